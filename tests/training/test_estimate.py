"""A run is estimated from real steps, the longest ones and a sample of all sizes, and leaves no files."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_drafter, make_target
from tests.training.runs import QUIET, SHORT, SMALL, make_dataset
from transformers_falcon_spec.errors import OptionError, TrainingError
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.estimate import NUM_LONGEST, NUM_TIMED, RunEstimate, estimate_run, sample_rows
from transformers_falcon_spec.training.trainer import DrafterTrainer

pytestmark = pytest.mark.training


def estimated(folder: Path, uses_cache: bool = False, num_rows: int = 20, **options: Any) -> RunEstimate:
    target = make_target(**SMALL)
    args = DrafterTrainingArguments(str(folder / "out"), **{**QUIET, **SHORT, **options})
    return estimate_run(target, make_drafter(target).train(), make_dataset(num_rows), args, 0, uses_cache)


@pytest.mark.parametrize(
    ("options", "num_steps", "rows_per_step"),
    [
        ({"max_steps": 70}, 70, 4),
        ({"max_steps": -1, "num_train_epochs": 3}, 15, 4),
        ({"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 2}, 6, 8),
        (
            {"train_sampling_strategy": "random", "eval_strategy": "steps", "save_strategy": "steps", "save_steps": 1},
            12,
            4,
        ),
        ({"per_device_train_batch_size": 32}, 12, 32),
    ],
    ids=["steps", "epochs", "accumulating", "random, evaluating, saving", "few rows"],
)
def test_steps_are_those_of_the_run_and_each_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], num_steps: int, rows_per_step: int
) -> None:
    monkeypatch.setattr(DrafterTrainer, "_save_checkpoint", None)  # what is deleted need not be written
    start = time.perf_counter()
    estimate = estimated(tmp_path, **options)
    seconds = time.perf_counter() - start

    assert (estimate.num_steps, estimate.rows_per_step) == (num_steps, rows_per_step)
    assert len(estimate.step_seconds) == NUM_TIMED
    assert min(estimate.step_seconds) > 0
    assert sum(estimate.step_seconds) < seconds
    assert estimate.extract_seconds is None
    assert list(tmp_path.iterdir()) == []


def test_a_cache_is_estimated_and_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    estimate = estimated(tmp_path, uses_cache=True)

    num_tokens = sum(len(example["input_ids"]) for example in make_dataset(20).examples)
    assert estimate.cache_bytes == num_tokens * SMALL["hidden_size"] * 4
    assert estimate.extract_seconds is not None
    assert 0 < estimate.extract_seconds < 60
    assert list(tmp_path.iterdir()) == []


def test_the_steps_are_those_of_the_real_trainer_longest_rows_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, widths = DrafterTrainer.compute_loss, []

    def watched(self: DrafterTrainer, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        widths.append(inputs["attention_mask"].sum(-1).tolist())
        return compute(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(DrafterTrainer, "compute_loss", watched)
    estimated(tmp_path)

    lengths = sorted((len(example["input_ids"]) for example in make_dataset(20).examples), reverse=True)
    assert len(widths) == NUM_LONGEST + NUM_TIMED
    assert sorted(widths[0], reverse=True) == sorted(widths[1], reverse=True) == lengths[:4]
    assert [max(width) for width in widths[2:]] == sorted(max(width) for width in widths[2:])


@pytest.mark.parametrize("num_rows", [100, 32, 8, 4])
def test_sampled_steps_are_steps_of_the_epoch(num_rows: int) -> None:
    data, order = make_dataset(num_rows), torch.randperm(num_rows).tolist()
    steps = [order[start : start + 4] for start in range(0, num_rows, 4)]

    rows = sample_rows(steps, data.lengths, 4)

    sampled = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    lengths = sorted(len(example["input_ids"]) for example in data.examples)
    assert len(sampled) == NUM_LONGEST + NUM_TIMED
    assert sampled[0] == sampled[1]
    assert sorted(len(data[row]["input_ids"]) for row in sampled[0]) == lengths[-4:]
    assert all(step in steps for step in sampled[2:])


@pytest.mark.parametrize("power", [0, 1, 2], ids=["constant", "linear", "square"])
@pytest.mark.parametrize("batch_size", [4, 2])
def test_the_mean_of_the_sample_is_that_of_the_epoch_however_time_grows(power: int, batch_size: int) -> None:
    data = make_dataset(2000)

    def size(step: list[int]) -> int:
        widths = (step[start : start + batch_size] for start in range(0, len(step), batch_size))
        return sum(max(len(data[row]["input_ids"]) for row in batch) for batch in widths)

    groups = [range(start, start + 200) for start in range(0, 2000, 200)]  # sorted by length, as the Trainer's are
    order = [row for group in groups for row in sorted(group, key=lambda row: -size([row]))]
    steps = [order[start : start + 4] for start in range(0, 2000, 4)]

    rows = sample_rows(steps, data.lengths, batch_size)[4 * NUM_LONGEST :]

    sampled = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    expected = sum(size(step) ** power for step in steps) / len(steps)
    assert sum(size(step) ** power for step in sampled) / NUM_TIMED == pytest.approx(expected, rel=0.02)


def test_the_duration_is_the_number_of_steps_times_their_mean() -> None:
    assert RunEstimate(100, 4, 20, [1.0, 3.0, 1.0, 3.0], 0, None, None).train_seconds == pytest.approx(200)


def test_a_batch_that_does_not_fit_into_memory_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(DrafterTrainer, "compute_loss", full)

    with pytest.raises(TrainingError, match=r"longest batch must fit.*but CUDA out of memory\. Lower `--per_device"):
        estimated(tmp_path)


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DrafterTrainingArguments, "world_size", 2)

    with pytest.raises(OptionError, match="measures one process, but there are 2"):
        estimated(tmp_path)
