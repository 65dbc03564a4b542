"""Falcon checkpoints, converted: the same numbers as the published forward, and the target's own text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.families import VOCAB_SIZE
from tests.tiny import make_target
from transformers_falcon_spec import DraftTree, FalconSpecDrafter
from transformers_falcon_spec.drafters.falcon import paper_tree

from . import foreign, reference_falcon
from .drafting import View, chain, commits, converted, random_ids

LENGTH = 60
NUM_PASSES = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "two layers": {},
    "one layer": {"num_layers": 1},
    "qwen": {"num_layers": 1, "qkv_bias": True, "rope_theta": 1e6, "k_mask": 3},
    "without biases": {"bias": False, "k_mask": 4},
    "block of one": {"k_mask": 1, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_forward_is_the_published_one(variant: str, tmp_path: Path) -> None:
    config, weights = foreign.falcon(**VARIANTS[variant])
    drafter = converted(FalconSpecDrafter, foreign.written(tmp_path / "source", config, weights))
    embeds, features = torch.randn(2, LENGTH, foreign.HIDDEN)

    for phase in range(config["k_mask"]):
        expected = reference_falcon.features_of(weights, config, embeds, features, phase)
        found = drafter(embeds[None], features[None], torch.tensor([phase]))[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def default_double() -> Iterator[None]:
    torch.set_default_dtype(torch.double)
    yield
    torch.set_default_dtype(torch.float)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("default_double")
@torch.no_grad()
def test_what_differs_over_long_text_is_rounding(variant: str, tmp_path: Path) -> None:
    config, weights = foreign.falcon(**VARIANTS[variant])
    drafter = converted(FalconSpecDrafter, foreign.written(tmp_path / "source", config, weights)).double()
    embeds, features = torch.randn(2, 200, foreign.HIDDEN)

    weights = {name: value.double() for name, value in weights.items()}
    expected = reference_falcon.features_of(weights, config, embeds, features, 0)

    found = drafter(embeds[None], features[None], torch.tensor([0]))[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # norms compute in float32 whatever comes in


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_blocks_drafted_from_predicted_features_are_those_of_the_reference(variant: str, tmp_path: Path) -> None:
    config, weights = foreign.falcon(**VARIANTS[variant])
    drafter = converted(FalconSpecDrafter, foreign.written(tmp_path / "source", config, weights)).double()
    weights = {name: weight.double() for name, weight in weights.items()}
    size = config["k_mask"]
    depth = NUM_PASSES * size
    drafter.generation_config.draft_tree = DraftTree.chain(depth).to_json()
    ids, features, head = (
        random_ids(LENGTH),
        torch.randn(LENGTH - 1, foreign.HIDDEN).double(),
        torch.randn(VOCAB_SIZE, foreign.HIDDEN).double(),
    )
    view = View(weights["embed_tokens.weight"], head, foreign.HIDDEN)
    # With two layers the block in which a row is read changes what later rows read; with one layer it does not.
    ends = (LENGTH - 4, LENGTH - 1, LENGTH) if config["num_hidden_layers"] == 1 else (LENGTH,)
    expected, predicted = reference_falcon.drafted(
        weights, config, ids.tolist(), features, lambda rows: rows @ head.T, num_passes=NUM_PASSES
    )

    found = chain(drafter, view, commits(ids, features, ends), depth)

    assert found == expected
    torch.testing.assert_close(torch.cat(view.read), predicted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [{"do_sample": False}, runs.SAMPLING], ids=["greedy", "sampling"])
def test_the_text_is_the_targets_own(mode: dict[str, Any], tmp_path: Path) -> None:
    target = make_target("llama").double()
    config, weights = foreign.falcon()
    drafter = converted(FalconSpecDrafter, foreign.written(tmp_path / "source", config, weights)).double()
    drafter.generation_config.draft_tree = DraftTree.from_lists(runs.BUSHY).to_json()

    pair = runs.informed(target, drafter, **mode)

    pair.assert_equal()
    assert pair.stats.num_drafted > 0


@pytest.mark.parametrize(("block_size", "depth"), [(1, 8), (2, 8), (3, 6), (4, 8)])
def test_a_converted_drafter_brings_the_papers_tree(block_size: int, depth: int, tmp_path: Path) -> None:
    config, weights = foreign.falcon(k_mask=block_size)

    drafter = converted(FalconSpecDrafter, foreign.written(tmp_path / "source", config, weights))

    assert drafter.draft_tree.to_json() == paper_tree(block_size).to_json()
    assert int(drafter.draft_tree.depths.max()) == depth
    target = make_target("llama").double()
    drafter.generation_config.tune = False  # all of the tree is drafted
    pair = runs.informed(target, drafter.double())
    pair.assert_equal()
    assert pair.stats.num_drafted > pair.stats.num_steps * 30
    assert pair.stats.acceptance_length > 1
