"""Speed by size of tree: what grows, and what is tuned, is compared with the best static size of all prompts together."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.budgets import beside_best_static, measured_acceptance

SECONDS = {  # of two prompts of 10 tokens
    "target alone": (9.0, 9.0),
    "static, 4 nodes, 1 passes": (2.0, 6.0),
    "static, 8 nodes, 1 passes": (5.0, 2.0),  # the best: 7 seconds in all
    "grown, 4 nodes, 1 passes": (5.0, 5.0),
    "grown, 8 nodes, 1 passes": (4.0, 1.0),
    "tuned": (5.0, 9.0),
    "tuned, static": (2.5, 1.0),
}


def _records(decoding: str, factor: float = 1.0) -> list[dict[str, Any]]:
    return [
        {
            "decoding": decoding,
            "method": method,
            "set": "sums",
            "prompt": str(prompt),
            "num_tokens": 10,
            "seconds": each * factor,
        }
        for method, seconds in SECONDS.items()
        for prompt, each in enumerate(seconds)
    ]


def test_everything_is_compared_with_the_best_static_size() -> None:
    rows = beside_best_static([*_records("greedy"), *_records("temperature-0.7", factor=2.0)])

    assert {row["best_static"] for row in rows} == {"static, 8 nodes, 1 passes"}
    assert [(row["decoding"], row["method"]) for row in rows[:3]] == [
        ("greedy", "grown, 8 nodes, 1 passes"),
        ("greedy", "tuned"),
        ("greedy", "tuned, static"),
    ]
    assert [row["ratio"] for row in rows[:3]] == pytest.approx([7 / 5, 7 / 14, 7 / 3.5])
    assert [row["ratio"] for row in rows[3:]] == pytest.approx([row["ratio"] for row in rows[:3]])
    assert rows[0]["interval"] == pytest.approx((5 / 4, 2.0))  # one prompt twice, or the other
    assert [row["num_prompts"] for row in rows] == [2] * 6


@pytest.mark.parametrize("num_passes", [1, 2])
def test_acceptance_is_that_of_the_last_evaluation(num_passes: int) -> None:
    folder = Path(__file__).parents[2] / "models" / "falcon-reference"

    found = measured_acceptance(folder, block_size=3, num_passes=num_passes)

    last = json.loads((folder / "training.json").read_text(encoding="utf-8"))["curve"][-1]
    assert len(found) == 3 * num_passes
    for depth, shares in enumerate(found.tolist()):
        expected = [last[f"eval_rank_{rank}_at_{depth % 3 + 1}"] for rank in range(len(shares))]
        assert shares == pytest.approx(expected)
