"""A run whose loss is not finite stops at once, and keeps the last good checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.runs import make_dataset, make_trainer, same, weights
from transformers_falcon_spec.errors import TrainingError
from transformers_falcon_spec.training.checkpoints import newest_complete_checkpoint
from transformers_falcon_spec.training.features import FeatureCache
from transformers_falcon_spec.training.trainer import DrafterTrainer

pytestmark = pytest.mark.training

ORDERED = {"train_sampling_strategy": "sequential"}
SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
ABSURD = {"learning_rate": 1e30, "warmup_steps": 0, "weight_decay": 0.0}


class RisingRate(DrafterTrainer):
    """The rate becomes absurd after so many steps, so that good checkpoints come before the fall."""

    num_good = 3

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == self.num_good:
            for group in self.optimizer.param_groups:
                group["lr"] = 1e30
        return super().training_step(*args, **kwargs)


def rising(trainer: DrafterTrainer) -> DrafterTrainer:
    trainer.__class__ = RisingRate
    return trainer


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
def test_a_rate_far_too_high_stops_the_run_with_its_step(tmp_path: Path, optimizer: str) -> None:
    trainer = make_trainer(tmp_path, **ABSURD, **ORDERED, optim=optimizer, max_grad_norm=0.0)

    with pytest.raises(TrainingError, match=r"but at step 2 it is (nan|inf)\. Start anew with a lower"):
        trainer.train()

    assert trainer.state.global_step == 1


def test_the_last_good_checkpoint_is_kept_and_no_bad_one_written(tmp_path: Path) -> None:
    constant = {"lr_scheduler_type": "constant", "use_glancing": False, **ORDERED}  # nothing depends on `max_steps`
    good = make_trainer(tmp_path / "good", max_steps=3, **constant)
    good.train()
    trainer = rising(make_trainer(tmp_path / "run", **constant, **SAVING))

    with pytest.raises(
        TrainingError, match=r"at step 4 its update leaves weights that make it \[(nan|inf)\]"
    ) as raised:
        trainer.train()

    kept = newest_complete_checkpoint(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    assert f"`{kept}` was checked when it was written and stays" in str(raised.value)
    assert same(load_file(Path(kept or "") / "model.safetensors"), weights(good))


def test_the_last_step_is_checked_though_nothing_is_saved(tmp_path: Path) -> None:
    trainer = rising(make_trainer(tmp_path, max_steps=4, **ORDERED))

    with pytest.raises(TrainingError, match=r"at step 4 its update leaves.*No checkpoint was written before"):
        trainer.train()


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(tmp_path: Path, max_grad_norm: float) -> None:
    trainer = make_trainer(tmp_path, max_grad_norm=max_grad_norm, **ORDERED)
    weight = next(weight for weight in trainer.model.parameters() if weight.requires_grad)
    weight.register_hook(lambda gradient: gradient * float("inf"))
    before = weights(trainer)

    with pytest.raises(TrainingError, match=r"at step 1 the norm of its gradient is (nan|inf)"):
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
        step = 3 if num_batches == 1 else 2
        with pytest.raises(TrainingError, match=f"at step {step} it is nan"):
            trainer.train()


def test_the_error_names_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.fill_(float("nan"))

    with pytest.raises(TrainingError, match="at step 0 it is nan in evaluation"):
        trainer.evaluate()


def test_checking_weights_changes_nothing(tmp_path: Path) -> None:
    found = []

    for name, options in (("plain", {}), ("saving", SAVING)):
        trainer = make_trainer(tmp_path / name, **options)
        trainer.train()
        found.append(weights(trainer))

    assert same(*found)
