"""Training speed, measured by a clock that the test moves, and in a real run."""

from pathlib import Path

import pytest
import torch

from tests.training.runs import make_trainer
from transformers_falcon_spec.training import metrics as throughput_file
from transformers_falcon_spec.training.metrics import Throughput

pytestmark = pytest.mark.training


def test_evaluations_and_checkpoints_are_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(throughput_file.time, "perf_counter", lambda: now[0])
    found = Throughput(torch.device("cpu"))

    with found.timed("run"):
        for target_seconds, rest in ((1.0, 2.0), (2.0, 3.0)):
            with found.timed("target"):
                now[0] += target_seconds
            now[0] += rest
            found.num_tokens += 20
        with found.timed("pause"), found.timed("pause"):
            now[0] += 100.0
    with found.timed("pause"):
        now[0] += 1000.0

    assert found.to_json() == {"train_tokens_per_second": 40 / 8, "target_share": 3 / 8}


def test_a_run_counts_the_tokens_that_it_was_shown(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=5, eval_strategy="steps", eval_steps=2)  # an epoch
    lengths = [len(trainer.train_dataset[row]["input_ids"]) for row in range(len(trainer.train_dataset))]

    trainer.train()

    seconds = trainer.throughput.seconds
    assert trainer.throughput.num_tokens == sum(lengths)
    assert 0 < seconds["target"] < seconds["run"] - seconds["pause"]
    assert seconds["pause"] > 0
