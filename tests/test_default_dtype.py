"""The default type of torch changes nothing for models that have a type: no tensor of the package takes it."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.every_drafter import KINDS, every_drafter, informed_of
from tests.tiny import make_drafter, make_target
from tests.training.runs import make_trainer, same, weights
from transformers_falcon_spec import DiffusionDrafter, EagleDrafter, MedusaDrafter
from transformers_falcon_spec.drafters.dflash import make_dflash
from transformers_falcon_spec.drafters.fingerprint import TargetFingerprint
from transformers_falcon_spec.generation.adapters import unwrapped
from transformers_falcon_spec.generation.probe import probe

pytestmark = pytest.mark.families

SOURCE = Path(__file__).parents[1] / "src"
OTHERS = (
    torch.bfloat16,
    pytest.param(torch.float16, marks=pytest.mark.slow),
    pytest.param(torch.float64, marks=pytest.mark.slow),
)
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0}
FLOATS = {"empty", "eye", "linspace", "logspace", "normal", "ones", "rand", "randn", "zeros"}  # of the default type
QUICK = {"falcon", "layers in parallel", "diffusion, trees"}
WEIGHTS = [  # made of plain tensors, or a buffer in their place: their type is the module's
    "drafters/dflash.py: torch.zeros(2, self.num_taps, config.hidden_size)",
    "drafters/lookahead.py: torch.empty(0)",
    "drafters/parallel_eagle.py: torch.zeros(config.feature_size)",
]
LEARNERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "falcon": (make_drafter, {"block_size": 2}),
    "eagle": (EagleDrafter.from_target, {"version": 3}),
    "medusa": (MedusaDrafter.from_target, {"num_heads": 2}),
    "dflash": (make_dflash, {"num_hidden_layers": 1, "block_size": 3, "target_layer_ids": [0]}),
    "diffusion": (DiffusionDrafter.from_target, {"num_hidden_layers": 1, "block_size": 3}),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, `dtype` is the type of tensors that are not given theirs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def untold(path: Path) -> list[str]:
    """Where a file makes a tensor of the default type."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        f"{path.relative_to(SOURCE / 'transformers_falcon_spec')}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FLOATS
        and "dtype" not in {keyword.arg for keyword in call.keywords}
    ]


def test_every_tensor_of_fractions_is_given_its_type() -> None:
    assert sorted(line for path in SOURCE.rglob("*.py") for line in untold(path)) == WEIGHTS


@pytest.mark.parametrize("dtype", OTHERS)
def test_a_target_has_the_same_fingerprint_and_read_in_the_same_way(dtype: torch.dtype) -> None:
    target, again = make_target(vocab_size=1500), make_target(vocab_size=1500)
    expected = TargetFingerprint.of_target(target), probe(target)

    with default_dtype(dtype):
        assert (TargetFingerprint.of_target(again), probe(again)) == expected


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_texts_are_the_same(kind: str, dtype: torch.dtype) -> None:
    target = make_target(num_hidden_layers=3).double()
    drafter, gold = every_drafter(kind, target), runs.plain(target, **SAMPLED).sequences
    expected = runs.drafted(target, informed_of(unwrapped(drafter), gold), **SAMPLED)
    state = torch.get_rng_state()

    with default_dtype(dtype):
        given = runs.drafted(target, informed_of(unwrapped(drafter), gold), **SAMPLED)

    assert given.sequences.tolist() == expected.sequences.tolist() == gold.tolist()
    assert torch.get_rng_state().equal(state)
    assert given.speculation.kept_by_depth == expected.speculation.kept_by_depth
    assert given.speculation.acceptance_length > 1


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("verifier", ["gumbel", "recursive_rejection", "traversal"])
def test_rules_with_draws_of_their_own_draw_the_same(verifier: str, dtype: torch.dtype) -> None:
    target = make_target().double()
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config.verifier = verifier
    expected = runs.drafted(target, drafter, **SAMPLED)

    with default_dtype(dtype):
        given = runs.drafted(target, drafter, **SAMPLED)

    assert given.sequences.tolist() == expected.sequences.tolist()
    assert given.speculation.kept_by_depth == expected.speculation.kept_by_depth


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize("kind", LEARNERS)
def test_training_learns_the_same(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, options = LEARNERS[kind]

    def learned(default: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        trainer = make_trainer(tmp_path, options, make=make, max_steps=2, logging_steps=1)
        with default_dtype(default):
            trainer.train()
            metrics = trainer.evaluate()
        return weights(trainer), {name: value for name, value in metrics.items() if "rank" in name}

    expected, shares = learned(torch.float32)
    given, shares_given = learned(dtype)

    assert same(given, expected)
    assert shares_given == shares
    assert shares


@pytest.mark.parametrize("dtype", OTHERS)
@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_models_that_are_made_in_it_decode(kind: str, dtype: torch.dtype) -> None:
    with default_dtype(dtype):
        target = make_target(num_hidden_layers=3)
        drafter = every_drafter(kind, target)
        gold = runs.plain(target).sequences
        out = runs.drafted(target, informed_of(unwrapped(drafter), gold))

    assert target.dtype == dtype
    assert out.sequences.shape == gold.shape
    assert out.speculation.num_accepted > 0
