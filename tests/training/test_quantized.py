"""Drafters learn from targets with quantised weights: gradients pass through the head, and features are the target's."""

from pathlib import Path
from typing import Any

import pytest

from tests import quantized, runs
from tests.adapters import KINDS
from tests.tiny import make_target
from tests.training.runs import SMALL, make_dataset, make_trainer
from transformers_falcon_spec.errors import DrafterMismatchError, TrainingError
from transformers_falcon_spec.training.features import FeatureCache, TargetFeatures

pytestmark = pytest.mark.quantized


def make_quantized(seed: int = 0, kind: str = "in place") -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415  only this lane has it

    if kind != "in place":
        return quantized.loaded(kind, seed=seed, num_hidden_layers=2)
    target = make_target(seed=seed, **SMALL)
    quantize_(target, Int8WeightOnlyConfig())
    return target


OF_DIFFUSION = "diffusion"  # copies layers of the target, which bitsandbytes' cannot be
IN_BLOCKS = [*((kind, "nf4") for kind in KINDS if kind != OF_DIFFUSION), ("falcon", "int8")]


@pytest.mark.parametrize(("kind", "quantization"), [*((kind, "in place") for kind in KINDS), *IN_BLOCKS])
def test_a_drafter_learns_from_a_quantised_target_and_drafts_for_it(
    kind: str, quantization: str, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tmp_path,
        max_steps=20,
        ttt_steps=2,
        make=lambda target, **_: KINDS[kind](target),
        make_target_of_run=lambda: make_quantized(kind=quantization),
    )
    before = trainer.evaluate()["eval_loss"]

    trainer.train()

    assert trainer.evaluate()["eval_loss"] < before
    pair = runs.both(trainer.features.target, trainer.model.eval())
    assert pair.stats.num_drafted > 0
    if quantization != "int8":  # which rounds what it reads
        pair.assert_equal(is_kept=False)


def test_a_diffusion_drafter_is_made_of_the_target_as_it_is_without_quantisation() -> None:
    with pytest.raises(DrafterMismatchError, match="Its weights are quantised: make the draft model of the target as"):
        KINDS[OF_DIFFUSION](make_quantized(kind="nf4"))


@pytest.mark.parametrize("kind", ["in place", "nf4", "int8"])
@pytest.mark.parametrize("other", [lambda _: make_target(**SMALL), lambda kind: make_quantized(1, kind)])
def test_features_of_another_target_are_refused(other: Any, kind: str, tmp_path: Path) -> None:
    data = make_dataset(4)
    FeatureCache(data, TargetFeatures(make_quantized(kind=kind), (-1,), 2), tmp_path)
    FeatureCache(data, TargetFeatures(make_quantized(kind=kind), (-1,), 2), tmp_path)

    with pytest.raises(TrainingError, match="must hold features of this target and data"):
        FeatureCache(data, TargetFeatures(other(kind), (-1,), 2), tmp_path)
