"""Drafters learn from targets with 8-bit weights: gradients pass through the head, and features are the target's."""

from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.adapters import KINDS
from tests.tiny import make_target
from tests.training.runs import SMALL, make_dataset, make_trainer
from transformers_falcon_spec.errors import TrainingError
from transformers_falcon_spec.training.feature_cache import FeatureCache
from transformers_falcon_spec.training.features import TargetFeatures

pytestmark = pytest.mark.quantized


def make_quantized(seed: int = 0) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415  only this lane has it

    target = make_target(seed=seed, **SMALL)
    quantize_(target, Int8WeightOnlyConfig())
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_learns_from_a_quantised_target_and_drafts_for_it(kind: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        max_steps=20,
        ttt_steps=2,
        make=lambda target, **_: KINDS[kind](target),
        make_target_of_run=make_quantized,
    )
    before = trainer.evaluate()["eval_loss"]

    trainer.train()

    assert trainer.evaluate()["eval_loss"] < before
    runs.both(trainer.features.target, trainer.model.eval()).assert_equal(is_kept=False)


@pytest.mark.parametrize("other", [lambda: make_target(**SMALL), lambda: make_quantized(seed=1)])
def test_features_of_another_target_are_refused(other: Any, tmp_path: Path) -> None:
    data = make_dataset(4)
    FeatureCache(data, TargetFeatures(make_quantized(), (-1,), 2), tmp_path)
    FeatureCache(data, TargetFeatures(make_quantized(), (-1,), 2), tmp_path)

    with pytest.raises(TrainingError, match="must hold features of this target and data"):
        FeatureCache(data, TargetFeatures(other(), (-1,), 2), tmp_path)
