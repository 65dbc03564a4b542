"""What a `DrafterTrainer` takes: conversations or token ids, a drafter or a method, and the options of any Trainer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import BatchEncoding, TrainerCallback, TrainingArguments

from tests.chat import MARKED_TEMPLATE, make_rows, make_tokenizer, write_rows
from tests.tiny import make_drafter, make_target
from tests.training.runs import QUIET, SMALL
from transformers_falcon_spec import (
    ConversationError,
    DrafterTrainer,
    DrafterTrainingArguments,
    EagleDrafter,
    FalconSpecDrafter,
    OptionError,
    TrainingError,
)
from transformers_falcon_spec.training.conversations import prepared
from transformers_falcon_spec.training.dataset import ConversationDataset

pytestmark = pytest.mark.training


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments a trainer makes the folder `trainer_output` where it is called."""
    monkeypatch.chdir(tmp_path)


def conversations(num_rows: int = 8, seed: int = 0) -> Dataset:
    return Dataset.from_list([{"messages": row, "topic": "sums"} for row in make_rows(num_rows, seed=seed)])


def arguments(folder: Path, **options: Any) -> DrafterTrainingArguments:
    return DrafterTrainingArguments(str(folder), **{**QUIET, "max_steps": 2, "logging_steps": 1, **options})


def test_conversations_are_trained_on_with_nothing_but_a_target_and_its_tokenizer(tmp_path: Path) -> None:
    target, tokenizer = make_target(**SMALL), make_tokenizer()

    trainer = DrafterTrainer(
        target=target,
        args=arguments(tmp_path),
        train_dataset=conversations(),
        eval_dataset={"sums": conversations(3, seed=1)},
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()

    record = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert list(trainer.train_dataset) == list(ConversationDataset(make_rows(8), tokenizer, 512))
    assert trainer.drafter.config.block_size == 3  # of the default recipe
    assert "eval_accuracy" in trainer.evaluate(conversations(3, seed=2))
    assert "eval_sums_accuracy" in trainer.evaluate()
    config = FalconSpecDrafter.from_pretrained(tmp_path).config
    lengths = trainer.train_dataset.lengths
    assert config.block_size == 3
    assert config.sliding_window == record["trained_length"] == max(lengths)  # one in twenty of eight is none
    assert record["num_examples"] == 8
    assert record["train_seconds"] > 0
    assert record["curve"][-1]["step"] == 2


def test_files_and_rows_are_evaluated_and_predicted_as_they_come(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "held_out.jsonl", make_rows(3, seed=1))
    trainer = DrafterTrainer(
        target=make_target(**SMALL), args=arguments(tmp_path / "out"), processing_class=make_tokenizer()
    )

    predicted = trainer.predict(conversations(3, seed=1))

    assert trainer.evaluate(str(file))["eval_loss"] == predicted.metrics["test_loss"]
    with pytest.raises(ConversationError, match="nowhere"):
        trainer.evaluate("nowhere.jsonl")


def test_weights_of_a_fresh_drafter_are_drawn_from_the_seed(tmp_path: Path) -> None:
    target = make_target(**SMALL)
    drafters = []
    for seed in (1, 1, 2):
        torch.rand(1)
        drafters.append(DrafterTrainer(target=target, args=arguments(tmp_path, seed=seed)).drafter)

    first, again, other = (torch.cat([weight.flatten() for weight in each.parameters()]) for each in drafters)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["compute_metrics", "compute_loss_func"])
def test_a_loss_and_metrics_of_ones_own_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"`{name}` must be left out, for loss and metrics are those of the kind"):
        DrafterTrainer(target=make_target(**SMALL), **{name: print})


def test_noise_on_embeddings_is_for_drafters_that_have_some(tmp_path: Path) -> None:
    common = {
        "target": make_target(**SMALL),
        "args": arguments(tmp_path, neftune_noise_alpha=5.0),
        "train_dataset": conversations(),
        "processing_class": make_tokenizer(),
    }

    DrafterTrainer(model="ar", **common).train()
    with pytest.raises(OptionError, match=r"`neftune_noise_alpha` must be left out, .* `FalconSpecDrafter` has none"):
        DrafterTrainer(**common)


def test_layers_are_computed_twice_where_the_drafter_can_do_so(tmp_path: Path) -> None:
    common = {
        "target": make_target(**SMALL),
        "args": arguments(tmp_path, gradient_checkpointing=True),
        "train_dataset": conversations(),
        "processing_class": make_tokenizer(),
    }

    DrafterTrainer(**common).train()
    with pytest.raises(OptionError, match="`gradient_checkpointing` must stay off for `MedusaDrafter`"):
        DrafterTrainer(model="medusa", **common)


@pytest.mark.parametrize("name", ["train", "eval"])
def test_data_of_less_than_a_batch_are_refused_where_such_are_dropped(tmp_path: Path, name: str) -> None:
    options = {"dataloader_drop_last": True, f"per_device_{name}_batch_size": 9}
    data = {"train_dataset": conversations(), "eval_dataset": conversations()}

    with pytest.raises(TrainingError, match=r"With `dataloader_drop_last` the .* must fill a batch of 9 rows, .* 8\."):
        DrafterTrainer(
            target=make_target(**SMALL), args=arguments(tmp_path, **options), processing_class=make_tokenizer(), **data
        )


def order_of(folder: Path, **options: Any) -> list[int]:
    """The order in which a run reads its rows."""
    trainer = DrafterTrainer(
        target=make_target(**SMALL),
        args=arguments(folder, **options),
        train_dataset=conversations(24),
        processing_class=make_tokenizer(),
    )
    return list(trainer._get_train_sampler())


def test_the_order_of_rows_is_drawn_from_data_seed_where_it_is_given(tmp_path: Path) -> None:
    first, second = (order_of(tmp_path, data_seed=seed) for seed in (1, 2))

    assert first != second
    assert first == order_of(tmp_path, data_seed=1, seed=7)
    assert order_of(tmp_path, seed=1) == first


def window_after(folder: Path, drafter: Any, lengths: list[int]) -> int | None:
    """The window in the config of `drafter` when training on rows of these lengths begins."""
    rows = [{"input_ids": list(range(5, 5 + length)), "assistant_mask": [1] * length} for length in lengths]
    target = make_target(**SMALL)
    trainer = DrafterTrainer(target=target, model=drafter, args=arguments(folder), train_dataset=rows)
    trainer.record_in_config(target)
    return trainer.drafter.config.sliding_window


def test_the_window_of_a_drafter_that_is_trained_on_covers_the_longest_training(tmp_path: Path) -> None:
    make_drafter(make_target(**SMALL), sliding_window=16).save_pretrained(tmp_path)

    found = []
    for length in (8, 24):
        drafter = FalconSpecDrafter.from_pretrained(tmp_path)
        found.append(window_after(tmp_path / "run", drafter, [length] * 4))

    assert found == [16, 24]


def test_the_window_that_a_fresh_drafter_was_made_with_is_kept(tmp_path: Path) -> None:
    drafter = make_drafter(make_target(**SMALL), sliding_window=16)

    assert window_after(tmp_path, drafter, [24] * 4) == 16


@pytest.mark.parametrize("mask", ["assistant_mask", "assistant_masks"])
def test_tokenised_rows_are_taken_as_they_are(mask: str) -> None:
    tokenizer = make_tokenizer(MARKED_TEMPLATE)
    expected = list(ConversationDataset(make_rows(4), tokenizer, 512))
    rows = [{"input_ids": row["input_ids"], mask: row["assistant_mask"]} for row in expected]

    found = prepared(Dataset.from_list(rows), None, 512)

    assert list(found) == expected


class Mapped(torch.utils.data.Dataset[Any]):
    """A data set of torch, without an iterator of its own."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def tokenised(mask: str = "assistant_masks", convert: Any = list) -> list[dict[str, Any]]:
    examples = list(ConversationDataset(make_rows(4), make_tokenizer(MARKED_TEMPLATE), 512))
    return [{"input_ids": row["input_ids"], mask: convert(row["assistant_mask"])} for row in examples]


def beside(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "attention_mask": [1] * len(row["input_ids"]), "source": "web", "number": 1}


def padded(row: dict[str, Any], num_left: int, num_right: int) -> dict[str, Any]:
    found = {name: [0] * num_left + list(values) + [0] * num_right for name, values in row.items()}
    return {**found, "attention_mask": [0] * num_left + [1] * len(row["input_ids"]) + [0] * num_right}


class Streamed(torch.utils.data.IterableDataset[Any]):
    """A data set of torch whose rows have no numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter(tokenised())


TOKENISED: dict[str, Any] = {
    "a list": tokenised,
    "a generator": lambda: (row for row in tokenised()),
    "a data set of torch without numbers": Streamed,
    "a stream": lambda: Dataset.from_list(tokenised()).to_iterable_dataset(),
    "a list of our masks": lambda: tokenised("assistant_mask"),
    "encodings": lambda: [BatchEncoding(row) for row in tokenised()],
    "a data set of torch": lambda: Mapped(tokenised()),
    "masks of truth values": lambda: tokenised(convert=lambda mask: [bool(each) for each in mask]),
    "arrays": lambda: [{name: np.array(value) for name, value in row.items()} for row in tokenised()],
    "lists of the numbers of arrays": lambda: [
        {name: list(np.array(value)) for name, value in row.items()} for row in tokenised()
    ],
    "other columns": lambda: [beside(row) for row in tokenised()],
    "a data set with other columns": lambda: Dataset.from_list([beside(row) for row in tokenised()]),
    "rows that are padded on the left": lambda: [padded(row, 7, 0) for row in tokenised()],
    "a data set that is padded on the right": lambda: Dataset.from_list([padded(row, 0, 7) for row in tokenised()]),
    "a data set in the format torch": lambda: Dataset.from_list(tokenised()).with_format("torch"),
    "a data set in the format numpy": lambda: Dataset.from_list(tokenised()).with_format("numpy"),
}


@pytest.mark.parametrize("name", TOKENISED)
def test_tokenised_rows_of_every_kind_give_the_same_examples(name: str) -> None:
    found = prepared(TOKENISED[name](), None, 512)

    assert list(found) == list(ConversationDataset(make_rows(4), make_tokenizer(MARKED_TEMPLATE), 512))
    assert found.treatments["tokenised before"] == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_ids": [5] * 5, "assistant_masks": [1] * 4},
        {"input_ids": [5] * 5, "assistant_masks": [1] * 5, "attention_mask": [1]},
        {"input_ids": [[5] * 5], "assistant_masks": [[1] * 5]},
        {"messages": make_rows(1)[0]},
    ],
    ids=["a short mask", "a short attention mask", "a batch", "a conversation"],
)
def test_tokenised_rows_whose_lists_do_not_fit_each_other_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="Row 1 must hold `input_ids` and `assistant_masks`"):
        prepared([{"input_ids": [5] * 5, "assistant_masks": [1] * 5}, wrong], None, 512)


def test_tokenised_rows_are_cut_as_conversations_are() -> None:
    found = prepared(tokenised(), None, 12)

    assert list(found) == list(ConversationDataset(make_rows(4), make_tokenizer(MARKED_TEMPLATE), 12))
    assert max(found.lengths) == 12


def test_a_file_a_table_and_one_named_split_are_trained_on(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", make_rows(3))
    target, tokenizer = make_target(**SMALL), make_tokenizer()
    expected = list(ConversationDataset(make_rows(3), tokenizer, 512))
    rows = [{"messages": row} for row in make_rows(3)]

    for data in (str(path), path, [str(path)], {"train": Dataset.from_list(rows)}, rows):
        trainer = DrafterTrainer(target=target, train_dataset=data, processing_class=tokenizer)
        assert list(trainer.train_dataset) == expected


def test_token_ids_without_embeddings_are_refused_before_a_step() -> None:
    rows = [*tokenised(), {"input_ids": [5, 5000], "assistant_masks": [0, 1]}]

    with pytest.raises(
        TrainingError, match=r"Row 4 of the training data must .* ids below \d+, .* but it has 2 tokens up to 5000\."
    ):
        DrafterTrainer(target=make_target(**SMALL), train_dataset=rows, processing_class=make_tokenizer())


def test_a_method_without_arguments_trains_by_its_recipe_and_given_ones_stay(tmp_path: Path) -> None:
    target, tokenizer = make_target(**SMALL), make_tokenizer()
    common = {"target": target, "train_dataset": conversations(), "processing_class": tokenizer}

    recipe = DrafterTrainer(**common)
    given = DrafterTrainer(args=arguments(tmp_path, learning_rate=0.25), **common)
    eagle = DrafterTrainer(model="eagle", **common)

    assert recipe.args.learning_rate == pytest.approx(2e-3 * (256 / 32) ** 0.5)
    assert not recipe.args.use_glancing
    assert given.args.learning_rate == 0.25
    assert isinstance(eagle.drafter, EagleDrafter)


class Unread:
    """Data that nobody may look at."""

    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"`{name}` of the data was asked for")


def test_plain_arguments_of_transformers_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"must be `DrafterTrainingArguments`, .* but they are `TrainingArguments`"):
        DrafterTrainer(target=make_target(**SMALL), args=TrainingArguments(str(tmp_path)), train_dataset=Unread())


def test_no_text_is_longer_than_the_context(tmp_path: Path) -> None:
    common = {"target": make_target(**SMALL, max_position_embeddings=20), "processing_class": make_tokenizer()}

    trainer = DrafterTrainer(args=arguments(tmp_path), train_dataset=conversations(), **common)

    assert max(trainer.train_dataset.lengths) == trainer.args.max_length == 20


class Reporter(TrainerCallback):
    """Keeps what reporters such as W&B and Trackio are told."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def test_reporters_are_told_losses_their_terms_and_metrics(tmp_path: Path) -> None:
    reporter = Reporter()
    trainer = DrafterTrainer(
        target=make_target(**SMALL),
        args=arguments(tmp_path / "out", report_to="tensorboard", eval_strategy="steps", eval_steps=2),
        train_dataset=conversations(),
        eval_dataset=conversations(3),
        processing_class=make_tokenizer(),
        callbacks=[reporter],
    )

    trainer.train()

    names = set().union(*reporter.logs)
    assert {"loss", "cross_entropy", "learning_rate", "eval_loss", "eval_accuracy_at_1"} <= names
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    ("data", "tokenizer", "message"),
    [
        ([{"title": "Hi"}], make_tokenizer(), r"a row must hold a list `messages` .* but it has \['title'\]"),
        ([{"input_ids": [1]}], None, r"must say what the assistant says, as an `assistant_mask`"),
        ([{"messages": make_rows(1)[0]}], None, r"`processing_class` must be the target's tokenizer .* `NoneType`"),
        ([], make_tokenizer(), "Data must have a row at least"),
    ],
    ids=["no conversation", "no mask", "no tokenizer", "nothing"],
)
def test_other_data_are_refused_in_words(data: Any, tokenizer: Any, message: str) -> None:
    with pytest.raises((TrainingError, ConversationError), match=message):
        prepared(data, tokenizer, 512)


def test_several_data_sets_to_train_on_are_refused_by_name() -> None:
    several = {"train": conversations(), "test": conversations()}

    with pytest.raises(TrainingError, match=r"one data set, but it holds several: \['test', 'train'\]"):
        DrafterTrainer(target=make_target(**SMALL), train_dataset=several, processing_class=make_tokenizer())


def test_a_drafter_that_was_evaluated_alone_is_saved_without_a_record(tmp_path: Path) -> None:
    target = make_target(**SMALL)
    common = {"target": target, "model": make_drafter(target), "args": arguments(tmp_path)}
    trainer = DrafterTrainer(eval_dataset=conversations(), processing_class=make_tokenizer(), **common)
    trainer.evaluate()

    trainer.save_model()

    assert (tmp_path / "model.safetensors").is_file()
    assert not (tmp_path / "training.json").exists()


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="`method` must be one of"):
        DrafterTrainer(target=make_target(**SMALL), model="hawk")
