"""A run whose loss is not finite stops at once, and keeps the last good checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.runs import make_dataset, make_trainer, same, weights
from transformers_falcon_spec.errors import TrainingError
from transformers_falcon_spec.training.features import FeatureCache

pytestmark = pytest.mark.training

ORDERED = {"train_sampling_strategy": "sequential"}
SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
ABSURD = {"learning_rate": 1e30, "warmup_steps": 0, "weight_decay": 0.0}


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
def test_a_rate_far_too_high_stops_the_run_with_its_step(tmp_path: Path, optimizer: str) -> None:
    trainer = make_trainer(tmp_path, **ABSURD, **ORDERED, optim=optimizer, max_grad_norm=0.0)

    with pytest.raises(TrainingError, match=r"after step 1 the loss is (nan|inf)\. Start anew with a lower"):
        trainer.train()

    assert trainer.state.global_step == 1


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(tmp_path: Path, max_grad_norm: float) -> None:
    trainer = make_trainer(tmp_path, max_grad_norm=max_grad_norm, **ORDERED)
    weight = next(weight for weight in trainer.model.parameters() if weight.requires_grad)
    weight.register_hook(lambda gradient: gradient * float("inf"))
    before = weights(trainer)

    with pytest.raises(TrainingError, match=r"after step 0 the norm of the gradient is (nan|inf)"):
        trainer.train()

    assert same(before, weights(trainer))


@pytest.mark.parametrize("num_batches", [1, 2])
def test_broken_features_stop_the_run_at_their_step(tmp_path: Path, num_batches: int) -> None:
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=num_batches, **ORDERED)
    trainer.train_dataset = FeatureCache(make_dataset(20), trainer.features, tmp_path / "cache")
    get = FeatureCache.__getitem__

    def broken(self: FeatureCache, index: int) -> dict[str, Any]:
        example = get(self, index)
        return {**example, "features": example["features"] * (float("nan") if index == 9 else 1)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureCache, "__getitem__", broken)
        step = 2 if num_batches == 1 else 1
        with pytest.raises(TrainingError, match=f"after step {step} the loss is nan"):
            trainer.train()


def test_the_error_names_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.fill_(float("nan"))

    with pytest.raises(TrainingError, match="after step 0 the loss is nan"):
        trainer.evaluate()
