"""Medusa heads, converted: the same numbers as the published forward, and the target's own text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import runs
from tests.families import VOCAB_SIZE
from tests.tiny import make_target
from transformers_falcon_spec import DraftTree, MedusaDrafter

from . import foreign, reference_medusa
from .drafting import View, chain, commits, converted, random_ids

LENGTH = 30
VARIANTS: dict[str, dict[str, Any]] = {
    "version 1": {},
    "two blocks": {"num_heads": 5, "num_layers": 2},
    "version 2": {"has_lm_heads": False, "vocab_size": VOCAB_SIZE},
}
FILES = {
    "version 1": "medusa_lm_head.pt",
    "two blocks": "medusa_lm_head.pt",
    "version 2": "medusa_lm_head.safetensors",
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_forward_is_the_published_one(variant: str, tmp_path: Path) -> None:
    config, weights = foreign.medusa(**VARIANTS[variant])
    drafter = converted(MedusaDrafter, foreign.written(tmp_path / "source", config, weights, FILES[variant]))
    num_heads = VARIANTS[variant].get("num_heads", 3)
    features = torch.randn(LENGTH, foreign.HIDDEN)

    found = drafter(features[:, None].expand(-1, num_heads, -1))

    expected = reference_medusa.outputs(weights, num_heads, config["medusa_num_layers"], features)
    torch.testing.assert_close(found, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_block_stored_under_several_names_is_several_blocks(tmp_path: Path) -> None:
    config, weights = foreign.medusa(num_layers=2)
    for part in ("weight", "bias"):
        weights[f"0.1.linear.{part}"] = weights[f"0.0.linear.{part}"]  # one module object, as in the published code
    features = torch.randn(LENGTH, foreign.HIDDEN)

    drafter = converted(MedusaDrafter, foreign.written(tmp_path / "source", config, weights, "medusa_lm_head.pt"))

    expected = reference_medusa.outputs(weights, 3, 2, features)
    torch.testing.assert_close(
        drafter(features[:, None].expand(-1, 3, -1)), expected.transpose(0, 1), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_head_i_drafts_the_token_i_positions_after_the_root(variant: str, tmp_path: Path) -> None:
    config, weights = foreign.medusa(**VARIANTS[variant])
    drafter = converted(MedusaDrafter, foreign.written(tmp_path / "source", config, weights, FILES[variant]))
    num_heads = VARIANTS[variant].get("num_heads", 3)
    drafter.generation_config.draft_tree = DraftTree.chain(num_heads).to_json()
    ids, features = random_ids(LENGTH), torch.randn(LENGTH - 1, foreign.HIDDEN)
    head = torch.randn(VOCAB_SIZE, foreign.HIDDEN)
    outputs = reference_medusa.outputs(weights, num_heads, config["medusa_num_layers"], features[-1:])[:, 0]
    logits = outputs if variant != "version 2" else outputs @ head.T

    found = chain(drafter, View(head, head, foreign.HIDDEN), commits(ids, features, (LENGTH - 2, LENGTH)), num_heads)

    assert found == logits.argmax(-1).tolist()


@pytest.mark.parametrize("mode", [{"do_sample": False}, runs.SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("variant", ["version 1", "version 2"])
def test_the_text_is_the_targets_own(variant: str, mode: dict[str, Any], tmp_path: Path) -> None:
    target = make_target("llama").double()
    config, weights = foreign.medusa(**VARIANTS[variant])
    source = foreign.written(tmp_path / "source", config, weights, FILES[variant])
    drafter = converted(MedusaDrafter, source).double()

    pair = runs.informed(target, drafter, **mode)

    pair.assert_equal()
    assert pair.stats.num_drafted > 0
