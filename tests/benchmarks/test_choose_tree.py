"""Choosing a tree: what static trees are fitted to is what the drafter's last evaluation found, for every pass alike."""

import json
from pathlib import Path

import pytest

from benchmarks.choose_tree import measured_acceptance

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("num_passes", [1, 2])
def test_acceptance_is_that_of_the_last_evaluation(num_passes: int) -> None:
    folder = ROOT / "models" / "falcon-reference"

    found = measured_acceptance(folder, block_size=3, num_passes=num_passes)

    last = json.loads((folder / "training.json").read_text(encoding="utf-8"))["curve"][-1]
    assert len(found) == 3 * num_passes
    for depth, shares in enumerate(found.tolist()):
        expected = [last[f"eval_rank_{rank}_at_{depth % 3 + 1}"] for rank in range(len(shares))]
        assert shares == pytest.approx(expected)
