"""A run ends with the weights that decoded best, not with the last ones; with the real Trainer."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.training.runs import SMALL, make_trainer, same, weights
from transformers_falcon_spec.drafters.autoregressive import make_draft_model

pytestmark = pytest.mark.training

EVALUATED = {
    "max_steps": 3,
    "learning_rate": 1e-6,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "eval_decode_prompts": 2,
    "eval_decode_tokens": 8,
    "metric_for_best_model": "acceptance_length",
    "greater_is_better": True,
    "load_best_model_at_end": True,
}


class Ruin(TrainerCallback):
    """After the first step, a learning rate that no drafter survives."""

    def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, optimizer: Any, **_: Any) -> None:
        if state.global_step >= 1:
            for group in optimizer.param_groups:
                group["lr"] = 0.5


def lengths(trainer: Any) -> dict[int, float]:
    """Acceptance length by step."""
    name = "eval_acceptance_length"
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


@pytest.mark.parametrize("patience", [None, 1], ids=["to the end", "stopped early"])
def test_the_weights_that_decode_best_come_back(tmp_path: Path, patience: int | None) -> None:
    copy_of_target = {"num_hidden_layers": SMALL["num_hidden_layers"]}  # always right, to begin with
    trainer = make_trainer(tmp_path, copy_of_target, make=make_draft_model, **EVALUATED)
    trainer.add_callback(Ruin())
    if patience is not None:
        trainer.add_callback(EarlyStoppingCallback(patience))

    trainer.train()

    found = lengths(trainer)
    assert list(found) == ([1, 2, 3] if patience is None else [1, 2])
    assert found[1] > 1.5 > found[2]
    assert trainer.state.best_metric == found[1]
    assert same(weights(trainer), load_file(tmp_path / "checkpoint-1" / "model.safetensors"))
    assert trainer.evaluate()["eval_acceptance_length"] == found[1]
