"""Grown trees beside static ones: the best of each kind at a price, and the table."""

from typing import Any

import pytest
import torch

from benchmarks.prices import Price
from benchmarks.tree_sizes import GROWN, REPORT, STATIC, methods_of, winner
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec.provenance import provenance

PRICES = [
    Price("cheap", "cheap nodes", "7b", "bfloat16", {1: 1.0, 64: 1.0}, bytes_per_second=1.0),
    Price("dear", "dear nodes", "7b", "bfloat16", {1: 1.0, 16: 2.0, 64: 8.0}, bytes_per_second=1.0),
]
ACCEPTED = {(GROWN, 16): 20, (STATIC, 16): 30, (GROWN, 64): 70, (STATIC, 64): 60}


def _methods() -> dict[tuple[str, int, int], Any]:
    drafter = make_drafter(make_target())
    rates = torch.full((drafter.block_size, 10), 0.05)
    return methods_of(drafter, {1: rates}, [16, 64])


def _runs(methods: dict[tuple[str, int, int], Any]) -> list[dict[str, Any]]:
    shared = {"decoding": "greedy", "set": "gsm8k", "prompt": "0"}
    return [
        {
            **shared,
            "method": method.name,
            "speculation": {
                "num_steps": 10,
                "num_drafted": 10 * (size - 1),
                "num_accepted": ACCEPTED[kind, size],
                "num_passes": 10,
            },
        }
        for (kind, size, _), method in methods.items()
    ]


def test_both_kinds_draft_every_size() -> None:
    methods = _methods()

    assert [*methods] == [(kind, size, 1) for size in (16, 64) for kind in (GROWN, STATIC)]
    assert [method.num_nodes for method in methods.values()] == [16, 16, 64, 64]
    assert [method.assistant.is_tree_dynamic for method in methods.values()] == [True, False] * 2


def test_who_wins_depends_on_the_price() -> None:
    methods = _methods()
    runs, num_bytes = _runs(methods), {"cheap": 0, "dear": 0}

    cheap, dear = (winner(runs, methods, price, num_bytes)["greedy"] for price in PRICES)

    assert (cheap[GROWN]["method"], cheap[STATIC]["method"]) == (
        "grown, 64 nodes, 1 passes",
        "static, 64 nodes, 1 passes",
    )
    assert cheap["ratio"] == pytest.approx(8 / 7)
    assert dear[STATIC] == {"rate": pytest.approx(2.0), "method": "static, 16 nodes, 1 passes"}
    assert dear["ratio"] == pytest.approx(3 / 4)


def test_the_table_has_the_best_of_both_kinds_at_each_price() -> None:
    methods = _methods()
    runs, num_bytes = _runs(methods), {"cheap": 0, "dear": 0}
    result = {
        "provenance": provenance(seed=0, limit=1),
        "rows": [{"decoding": "greedy"}],
        "winners": [winner(runs, methods, price, num_bytes) for price in PRICES],
    }

    text = REPORT.render(result, "tree_sizes.json")

    assert (
        "| greedy | dear | grown, 16 nodes, 1 passes: 2 tokens/s | static, 16 nodes, 1 passes: 2 tokens/s | 0.75"
        in text
    )
