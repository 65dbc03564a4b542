"""Which weights a run ends with: those that decoded best, and not the last ones; with the real Trainer."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.training.runs import make_trainer, same, weights

EVALUATED = {
    "max_steps": 40,
    "eval_strategy": "steps",
    "eval_steps": 8,
    "save_strategy": "steps",
    "save_steps": 8,
    "eval_decode_prompts": 6,
    "eval_decode_tokens": 24,
    "metric_for_best_model": "acceptance_length",
    "greater_is_better": True,
    "load_best_model_at_end": True,
}


class Ruin(TrainerCallback):
    """From a step on, a learning rate that no drafter survives."""

    def __init__(self, first: int) -> None:
        self.first = first

    def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, optimizer: Any, **_: Any) -> None:
        if state.global_step >= self.first:
            for group in optimizer.param_groups:
                group["lr"] = 3.0


def lengths(trainer: Any) -> dict[int, float]:
    """Acceptance length by step."""
    name = "eval_acceptance_length"
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


@pytest.mark.parametrize("patience", [None, 1], ids=["to the end", "stopped early"])
def test_the_weights_that_decode_best_come_back(tmp_path: Path, patience: int | None) -> None:
    trainer = make_trainer(tmp_path, **EVALUATED)
    trainer.add_callback(Ruin(first=24))
    if patience is not None:
        trainer.add_callback(EarlyStoppingCallback(patience))

    trainer.train()

    found = lengths(trainer)
    best = max(found, key=lambda step: found[step])
    assert best <= 24 < max(found)
    assert found[max(found)] < found[best]
    assert max(found) == (40 if patience is None else 32)
    assert trainer.state.best_metric == found[best]
    assert same(weights(trainer), load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors"))
    assert trainer.evaluate()["eval_acceptance_length"] == found[best]
