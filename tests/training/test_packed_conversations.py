"""Rows of several conversations: how they are filled, what they hold, and how the Trainer uses them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chat import make_rows, make_tokenizer
from tests.training.runs import loss_curve, make_dataset, make_trainer, same, weights
from transformers_falcon_spec.errors import OptionError, TrainingError
from transformers_falcon_spec.training.dataset import ConversationCollator, ConversationDataset, row_origins
from transformers_falcon_spec.training.features import FeatureCache
from transformers_falcon_spec.training.packing import PackedConversations, best_fit

pytestmark = pytest.mark.training

ROW_LENGTH = 100


def packed(num_rows: int = 40, seed: int = 0) -> PackedConversations:
    return PackedConversations.fill(make_dataset(num_rows), ROW_LENGTH, seed)


def naive_best_fit(lengths: list[int], row_length: int, order: list[int]) -> list[list[int]]:
    """Every bin is looked at for every conversation."""
    bins: list[list[int]] = []
    for number in sorted(order, key=lambda number: -lengths[number]):
        free = [row_length - sum(lengths[each] for each in row) for row in bins]
        fitting = [size for size in free if size >= lengths[number]]
        if fitting:
            bins[free.index(min(fitting))].append(number)
        else:
            bins.append([number])
    return bins


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("row_length", [30, 64, 500])
def test_bins_are_as_full_as_those_of_loops_and_hold_everything_once(seed: int, row_length: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 31, (200,), generator=generator).tolist()

    bins = best_fit(lengths, row_length, torch.Generator().manual_seed(seed))

    naive = naive_best_fit(lengths, row_length, torch.randperm(200).tolist())
    sums = [sum(lengths[number] for number in row) for row in bins]
    assert sorted(number for row in bins for number in row) == list(range(200))
    assert max(sums) <= row_length
    assert sorted(sums) == sorted(sum(lengths[number] for number in row) for row in naive)
    assert len(bins) <= 11 / 9 * -(-sum(lengths) // row_length) + 4


def test_the_seed_alone_decides_which_conversations_go_together() -> None:
    lengths = [5] * 50
    before = torch.get_rng_state()

    first, again, other = (best_fit(lengths, 20, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))

    assert first == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_a_conversation_longer_than_a_row_is_refused() -> None:
    with pytest.raises(OptionError, match="Rows of 20 tokens must hold every conversation, but the longest has 21"):
        best_fit([3, 21], 20, torch.Generator())


def test_nothing_fills_no_row() -> None:
    assert best_fit([], 20, torch.Generator()) == []


def test_a_row_holds_complete_conversations_and_where_each_begins() -> None:
    data, rows = make_dataset(40), packed()

    for number, row in enumerate(rows.bins):
        example, examples = rows[number], [data[each] for each in row]
        for name in ("input_ids", "assistant_mask"):
            assert example[name] == [value for each in examples for value in each[name]]
        assert example["position_ids"] == [position for each in examples for position in range(len(each["input_ids"]))]
        assert rows.lengths[number] == len(example["input_ids"]) <= ROW_LENGTH
    assert len(rows) < 40 / 2


def test_positions_count_on_through_padding() -> None:
    examples = [
        {"input_ids": [5, 6, 7, 8], "assistant_mask": [0, 1, 0, 1], "position_ids": [0, 1, 0, 1]},
        {"input_ids": [9, 4], "assistant_mask": [0, 1], "position_ids": [0, 1]},
    ]

    batch = ConversationCollator(0)(examples)

    assert batch["position_ids"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_cached_features_stay_with_their_conversations_and_train_alike(tmp_path: Path) -> None:
    online = make_trainer(tmp_path / "online", train_dataset=packed(), logging_steps=1)
    online.train()
    cached = make_trainer(tmp_path / "cached", logging_steps=1)
    cache = FeatureCache(make_dataset(40), cached.features, tmp_path / "shards")
    cached.train_dataset = rows = PackedConversations.fill(cache, ROW_LENGTH, 0)
    cached.features.target.get_decoder().forward = None  # nobody may run the target
    cached.train()

    losses = [loss_curve(trainer) for trainer in (online, cached)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    for number, row in enumerate(rows.bins):
        assert rows[number]["features"].equal(torch.cat([cache[each]["features"] for each in row]))


def test_a_packed_run_that_goes_on_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", {"block_size": 3}, packed(), save_strategy="steps", save_steps=1)
    whole.train()

    resumed = make_trainer(tmp_path / "resumed", {"block_size": 3}, packed())
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))

    assert same(weights(whole), weights(resumed))


@pytest.mark.parametrize("is_cached", [False, True])
def test_conversations_of_a_packed_batch_are_found_by_their_tokens(tmp_path: Path, is_cached: bool) -> None:
    data: Any = ConversationDataset(make_rows(6), make_tokenizer(), 64, [f"line {number}" for number in range(6)])
    if is_cached:
        data = FeatureCache(data, make_trainer(tmp_path).features, tmp_path / "shards")
    rows = PackedConversations(data, [[4, 1], [0], [5, 3, 2]])

    batch = ConversationCollator(0)([rows[2], rows[1], rows[0]])

    assert row_origins(rows, batch) == [f"line {number}" for number in (5, 3, 2, 0, 4, 1)]


def test_the_error_for_a_packed_batch_names_its_conversations(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, train_dataset=packed(), per_device_train_batch_size=1, train_sampling_strategy="sequential"
    )
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))

    names = "; ".join(f"row {number}" for number in trainer.train_dataset.bins[0])
    with pytest.raises(TrainingError, match=f"at step 1 it is nan. Rows of the batch: {names}\\."):
        trainer.train()
