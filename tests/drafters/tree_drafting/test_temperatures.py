"""Temperatures of a drafter's node_probs: what a config takes, which node_probs come of them, and that the text never does."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.drafters.eagle.kinds import make_eagle
from tests.tiny import VOCAB_SIZE, make_drafter, make_target
from transformers_falcon_spec import EagleDrafter, FalconSpecConfig, FalconSpecDrafter, SpeculationConfig
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.drafting import DraftBudget
from transformers_falcon_spec.generation.target import Target

STORED = {"greedy": [0.5, 1.6], "sampled": [0.0, 0.8]}
TREES = {"dynamic_tree": True, "tree_depth": 4, "num_tree_nodes": 10}


def place_temperature(depth: int, temperature: float) -> float:
    """Of the block offset at `depth`, 1 below the root: the naive twin of what the package looks up for blocks of two."""
    offset = (depth - 1) % 2
    return math.sqrt(STORED["greedy"][offset] ** 2 + (temperature * STORED["sampled"][offset]) ** 2)


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target(seed=7).double().requires_grad_(False)


def generator_of(target: Any, **options: Any) -> Any:
    drafter = make_drafter(target, block_size=2, **options)
    drafter.generation_config = SpeculationConfig(**TREES)
    return drafter.candidate_generator(Target(target, (-1,)), 100, torch.Generator())


@pytest.mark.parametrize("stored", [None, STORED])
@pytest.mark.parametrize("depth", [0, 2, 6])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_chances_are_the_softmax_of_the_scores_at_the_temperature_of_the_place(
    target: Any, stored: Any, depth: int, temperature: float | None
) -> None:
    generator = generator_of(target, confidence_temperatures=stored)
    randomness = torch.Generator().manual_seed(depth)
    logits = torch.randn(1, 3, 2, VOCAB_SIZE, generator=randomness, dtype=torch.double)
    noises = torch.empty(20, VOCAB_SIZE, dtype=torch.double).exponential_(generator=randomness)
    noise = None if temperature is None else lambda row, at: noises[at]
    budget = DraftBudget((100,), 512, temperature=temperature, noise=noise)

    generator.draft_logits = lambda _features: logits
    children = generator.children_of(None, logits, budget, depth, VOCAB_SIZE)
    blocks = torch.arange(3)[None]
    found = [children(offset, blocks, blocks) for offset in range(2)]
    node_probs = torch.stack([probs.exp().gather(-1, ids.argsort(-1)) for ids, probs in found], dim=2)

    heat = temperature or 0.0
    for block in range(3):
        for offset in range(2):
            at = depth + offset + 1
            own = logits[0, block, offset]
            spread = (temperature or 1.0) if stored is None else place_temperature(at, heat)
            weights = [
                math.exp((float(x) - heat * math.log(float(e))) / spread) for x, e in zip(own, noises[at], strict=True)
            ]
            expected = torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.double)
            torch.testing.assert_close(node_probs[0, block, offset], expected)


@pytest.mark.parametrize("mode", [{}, runs.SAMPLING])
@pytest.mark.parametrize("kind", ["falcon", "eagle-1"])
def test_the_text_is_the_targets_own_and_the_tree_another(target: Any, kind: str, mode: dict[str, Any]) -> None:
    drafts: list[list[Any]] = []
    greedy = [4.0, 0.1] if kind == "falcon" else [4.0]
    for stored in (None, {"greedy": greedy, "sampled": [0.0] * len(greedy)}):
        if kind == "falcon":
            drafter = make_drafter(target, block_size=2, confidence_temperatures=stored)
            drafter.generation_config = SpeculationConfig(**TREES)
        else:
            drafter = make_eagle(target, kind, confidence_temperatures=stored, **TREES)
        seen = watch_drafts(drafter)

        pair = runs.informed(target, drafter, **mode)

        pair.assert_equal()
        drafts.append(seen)
    assert drafts[0] != drafts[1]


def watch_drafts(drafter: Any) -> list[Any]:
    """Parents and tokens of every draft."""
    seen: list[Any] = []
    make = drafter.candidate_generator

    def watched(*args: Any) -> Any:
        generator = make(*args)
        propose = generator.propose

        def proposed(budget: DraftBudget) -> Any:
            draft = propose(budget)
            if draft is not None:
                seen.append((draft.parents.tolist(), draft.token_ids.tolist()))
            return draft

        generator.propose = proposed
        return generator

    drafter.candidate_generator = watched
    return seen


@pytest.mark.parametrize("kind", ["falcon", "eagle-1"])
def test_temperatures_are_kept_with_the_weights(target: Any, kind: str, tmp_path: Path) -> None:
    classes = {"falcon": FalconSpecDrafter, "eagle-1": EagleDrafter}
    stored = STORED if kind == "falcon" else {"greedy": [0.5], "sampled": [0.8]}
    if kind == "falcon":
        drafter = make_drafter(target, block_size=2, confidence_temperatures=stored)
    else:
        drafter = make_eagle(target, kind, confidence_temperatures=stored)

    drafter.save_pretrained(tmp_path)

    assert classes[kind].from_pretrained(tmp_path).config.confidence_temperatures == stored


@pytest.mark.parametrize(
    "stored",
    [
        {"greedy": [1.0, 1.0]},
        {"greedy": [1.0, 1.0], "sampled": [1.0, "x"]},
        {"greedy": [1.0, float("inf")], "sampled": [1.0, 1.0]},
        {"greedy": [1.0, -1.0], "sampled": [1.0, 1.0]},
        {"greedy": [1.0, 0.0], "sampled": [1.0, 1.0]},
        {"greedy": [1.0], "sampled": [1.0]},
        {"greedy": [1.0, 1.0], "sampled": [1.0] * 4},
        {"greedy": [1.0] * 4, "sampled": [1.0] * 4},
        {"greedy": [], "sampled": []},
    ],
)
def test_what_is_no_list_of_temperatures_is_refused(stored: Any) -> None:
    with pytest.raises(OptionError, match=r"A stored `confidence_temperatures` must be .* a block of 2, but it is"):
        FalconSpecConfig(hidden_size=64, num_attention_heads=4, block_size=2, confidence_temperatures=stored)
