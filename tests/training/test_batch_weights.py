"""Every token weighs the same, whatever batch it is read in; texts with nothing to draft are counted and end nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import make_eagle
from tests.training.processes import run_two
from tests.training.runs import make_trainer, still_phases
from transformers_falcon_spec import MedusaDrafter
from transformers_falcon_spec.errors import TrainingError
from transformers_falcon_spec.training.dataset import survey
from transformers_falcon_spec.training.trainer import DrafterTrainer

pytestmark = pytest.mark.training

# One long answer and short ones, which a mean of means would give as much weight as the long one.
LENGTHS = (60, 12, 14, 11, 13, 12, 15, 16)
PLAIN = {"feature_noise": 0.0, "use_glancing": False, "optim": "sgd", "max_grad_norm": 0.0, "weight_decay": 0.0}
ONE_STEP = {
    "max_steps": 1,
    "lr_scheduler_type": "constant",
    "train_sampling_strategy": "sequential",
    "learning_rate": 0.1,
}
FALCON = {"block_size": 2, "recurrence": "token", "recurrent_dropout": 0.0}
KINDS: dict[str, Any] = {
    "falcon": lambda target, **_: {"make": None, "drafter_options": FALCON},
    "eagle": lambda target, **_: {"make": make_eagle},
    "eagle 3": lambda target, **_: {"make": make_eagle, "drafter_options": {"version": 3}},
    "medusa": lambda target, **_: {"make": MedusaDrafter.from_target},
}


def make_rows(lengths: tuple[int, ...] = LENGTHS, prompt: int = 8) -> list[dict[str, list[int]]]:
    """Tokenised rows, of a prompt and an answer that fills them."""
    draws = torch.Generator().manual_seed(0)
    return [
        {
            "input_ids": torch.randint(6, 90, (length,), generator=draws).tolist(),
            "assistant_mask": [0] * prompt + [1] * (length - prompt),
        }
        for length in lengths
    ]


def trained(folder: Path, kind: str, rows: Any, **options: Any) -> DrafterTrainer:
    """A trainer after one step over all rows."""
    made = {name: value for name, value in KINDS[kind](None).items() if value is not None}
    trainer = make_trainer(folder, train_dataset=rows, logging_steps=1, **made, **{**PLAIN, **ONE_STEP, **options})
    with still_phases():
        trainer.train()
    return trainer


def gradient(trainer: DrafterTrainer, start: dict[str, Tensor]) -> Tensor:
    """What plain descent changed, in one vector."""
    after = trainer.model.state_dict()
    return torch.cat([(after[name] - value).flatten() for name, value in start.items() if value.is_floating_point()])


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("falcon", "long and short ones"), *((kind, "some with nothing to draft") for kind in KINDS)],
)
def test_accumulation_over_batches_equals_one_big_batch(kind: str, rows: str, tmp_path: Path) -> None:
    data = make_rows() if rows.startswith("long") else [*make_rows(), *make_rows((3, 2), prompt=1)]
    size = len(data)
    made = {name: value for name, value in KINDS[kind](None).items() if value is not None}
    start = {name: value.clone() for name, value in make_trainer(tmp_path, **made).model.state_dict().items()}

    found = {
        shape: trained(
            tmp_path, kind, data, per_device_train_batch_size=size // shape, gradient_accumulation_steps=shape
        )
        for shape in (1, 2, size)
    }

    steps = {shape: gradient(trainer, start) for shape, trainer in found.items()}
    losses = {shape: trainer.state.log_history[0]["loss"] for shape, trainer in found.items()}
    assert steps[1].norm() > 1e-3
    for shape in (2, size):
        assert (steps[shape] - steps[1]).norm() < 1e-3 * steps[1].norm(), shape
        assert losses[shape] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(kind: str, tmp_path: Path) -> None:
    made = {name: value for name, value in KINDS[kind](None).items() if value is not None}
    data = [*make_rows(), *make_rows((3,), prompt=1)]

    found = []
    for size in (9, 2, 1):
        with still_phases():
            found.append(make_trainer(tmp_path, per_device_eval_batch_size=size, **made).evaluate(data))

    for other in found[1:]:
        assert other["eval_loss"] == pytest.approx(found[0]["eval_loss"], rel=1e-4)
        assert other["eval_accuracy"] == pytest.approx(found[0]["eval_accuracy"])


@pytest.mark.parametrize("method", ["falcon", "eagle", "medusa", "dflash", "ar", "diffusion"])
def test_texts_with_nothing_to_draft_end_no_run_and_are_counted(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = {"input_ids": [7], "assistant_mask": [1]}
    data = [*make_rows((20, 18)), short, {"input_ids": [7, 8], "assistant_mask": [0, 0]}]
    trainer = method_trainer(method, tmp_path, data)

    with caplog.at_level("WARNING", logger="transformers_falcon_spec"):
        trainer.train()
        metrics = trainer.evaluate()

    assert trainer.state.global_step == 4
    survey(data, trainer.features.target, trainer.features.distance, "the data")
    assert "2 of 4 rows of the data teach nothing" in caplog.text
    assert 0 < metrics["eval_loss"] < 100
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses.count(0.0) == 2  # steps of a batch with nothing to draft


def test_terms_are_summed_over_all_processes_where_one_of_them_has_nothing_to_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = method_trainer("falcon", tmp_path, [*make_rows((20, 18)), {"input_ids": [7], "assistant_mask": [1]}])
    reduce = trainer.accelerator.reduce
    sizes = []

    def counted(values: Tensor, *args: Any) -> Any:
        sizes.append(values.numel())
        return reduce(values, *args)

    monkeypatch.setattr(trainer.accelerator, "reduce", counted)
    trainer.train()

    assert sum(size > 1 for size in sizes) == 4  # at each step, also at that of the third row


def method_trainer(method: str, folder: Path, data: Any) -> DrafterTrainer:
    """A trainer of one row a step, on the same rows as it is evaluated on."""
    from tests.training.runs import SMALL, make_target  # noqa: PLC0415  the target that `make_trainer` makes
    from transformers_falcon_spec.training.recipes import make_drafter  # noqa: PLC0415

    trainer = make_trainer(
        folder,
        train_dataset=data,
        make=lambda target, **_: make_drafter(method, target, data),
        make_target_of_run=lambda: make_target(**{**SMALL, "num_hidden_layers": 4}),
        max_steps=4,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        train_sampling_strategy="sequential",
        logging_steps=1,
    )
    trainer.train_dataset = data  # as it is, for tokenised rows that are given to a trainer are looked through
    trainer.eval_dataset = [dict(row) for row in data]
    return trainer


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"input_ids": [6, 7, 500, 8], "assistant_mask": [0, 1, 1, 1]},
            r"ids below \d+, .* it has 4 tokens up to 500",
        ),
        ({"input_ids": [6, -1, 7, 8], "assistant_mask": [0, 1, 1, 1]}, "Row 8 of the training data"),
    ],
)
def test_rows_that_the_target_cannot_read_are_named_before_the_first_step(
    row: dict[str, list[int]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=message):
        make_trainer(tmp_path, train_dataset=[*make_rows(), row])


TWO = """
import json, sys
from pathlib import Path
import torch
from tests.training.test_batch_weights import make_rows, trained

rows = [*make_rows(), *make_rows((3, 2, 3, 2), prompt=1)]  # the second process reads a batch with nothing to draft
size, times = json.loads(sys.argv[2])
trainer = trained(Path(sys.argv[1]), "falcon", rows, per_device_train_batch_size=size, gradient_accumulation_steps=times)
if trainer.args.process_index == 0:
    state = {name: value.tolist() for name, value in trainer.drafter.state_dict().items()}
    Path(sys.argv[1], "state.json").write_text(json.dumps([state, trainer.state.log_history[0]["loss"]]))
"""


@pytest.mark.slow  # two processes that start from nothing
@pytest.mark.parametrize("shape", [(6, 1), (2, 3)], ids=["whole", "accumulated"])
def test_two_processes_weigh_tokens_as_one_does(shape: tuple[int, int], tmp_path: Path) -> None:
    run_two(TWO, tmp_path, json.dumps(shape))

    state, loss = json.loads((tmp_path / "state.json").read_text())
    rows = [*make_rows(), *make_rows((3, 2, 3, 2), prompt=1)]
    alone = trained(tmp_path / "alone", "falcon", rows, per_device_train_batch_size=12)
    assert loss == pytest.approx(alone.state.log_history[0]["loss"], rel=1e-3)
    for name, value in alone.drafter.state_dict().items():
        torch.testing.assert_close(torch.tensor(state[name]), value, atol=1e-5, rtol=1e-4)
