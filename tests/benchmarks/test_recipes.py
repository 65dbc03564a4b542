"""Recipes beside each other: at the same cost or not at all, the first against every other at equal settings, and in a table."""

from typing import Any

import pytest

from benchmarks.recipes import REPORT, beside_first, check_costs
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.provenance import provenance

SECONDS = {  # of two prompts of 10 tokens
    "target": (9.0, 9.0),
    "ours, tuned": (1.0, 4.0),
    "ours, 8 nodes": (2.0, 2.0),
    "theirs, tuned": (5.0, 5.0),
    "theirs, 8 nodes": (2.0, 6.0),
}


def _runs() -> list[dict[str, Any]]:
    shared = {"decoding": "greedy", "set": "gsm8k", "num_tokens": 10}
    return [
        {**shared, "method": method, "prompt": str(prompt), "seconds": each}
        for method, seconds in SECONDS.items()
        for prompt, each in enumerate(seconds)
    ]


def _trained(name: str, **other: Any) -> dict[str, Any]:
    return {
        "name": name,
        "num_steps": 2000,
        "num_examples": 8000,
        "seed": 42,
        "train_seconds": 600.0,
        "accuracy": [0.7],
        **other,
    }


def test_the_first_recipe_is_held_against_every_other_at_equal_settings() -> None:
    rows = beside_first(_runs(), ["ours", "theirs"])

    assert [(row["kind"], row["other"]) for row in rows] == [("tuned", "theirs"), ("8 nodes", "theirs")]
    assert [row["ratio"] for row in rows] == pytest.approx([10 / 5, 8 / 4])
    assert rows[0]["interval"] == pytest.approx((5 / 4, 5.0))


@pytest.mark.parametrize("other", [{"num_steps": 500}, {"num_examples": 4000}])
def test_recipes_of_unequal_cost_are_refused(other: dict[str, int]) -> None:
    check_costs([_trained("ours"), _trained("theirs")])

    with pytest.raises(OptionError, match=r"at the same cost, but steps and conversations are .*Train them alike"):
        check_costs([_trained("ours"), _trained("theirs", **other)])


def test_the_table_shows_cost_speed_and_comparison() -> None:
    rows = [
        {
            "decoding": "greedy",
            "method": method,
            "set": "gsm8k",
            "speedup": 2.0,
            "speedup_interval": [1.5, 2.5],
            "acceptance_length_pooled": 3.25,
        }
        for method in SECONDS
        if method != "target"
    ]
    result = {
        "provenance": provenance(seed=0, shape="0.3b", dtype="bfloat16", limit=4),
        "trained": [_trained("ours", accuracy=[0.71, 0.66]), _trained("theirs")],
        "rows": rows,
        "beside": beside_first(_runs(), ["ours", "theirs"]),
    }

    text = REPORT.render(result, "recipes.json")

    assert "2000 steps each on the same 8000 conversations" in text
    assert "| ours | 10 min | 0.710 0.660 |" in text
    assert "| greedy | ours, tuned | 2.00 (1.50 to 2.50), 3.25 |" in text
    assert "| greedy | 8 nodes | ours beside theirs | 2.00 (1.00 to 3.00) |" in text
