"""The best rival is one method over all prompt sets, and who is ahead on a set is named."""

from typing import Any

import pytest

from benchmarks.standings import POOLED, standings, standings_table

SECONDS = {  # of a prompt of 10 tokens of each set
    "target": {"gsm8k": 10.0, "mt_bench": 10.0},
    "falcon": {"gsm8k": 5.0, "mt_bench": 4.0},
    "falcon5": {"gsm8k": 2.0, "mt_bench": 4.0},
    "eagle": {"gsm8k": 4.0, "mt_bench": 8.0},
    "lookup": {"gsm8k": 9.0, "mt_bench": 2.0},
}


def runs() -> list[dict[str, Any]]:
    """A prompt of each set for each method."""
    shared = {"decoding": "greedy", "num_tokens": 10, "prompt": "0"}
    return [
        {**shared, "method": method, "set": name, "seconds": seconds}
        for method, sets in SECONDS.items()
        for name, seconds in sets.items()
    ]


def test_the_best_rival_of_all_prompts_is_the_one_on_each_set() -> None:
    rows = standings(runs(), ["falcon", "falcon5"])

    found = {(row["set"], row["method"], row["other"]): row["ratio"] for row in rows}
    assert found == pytest.approx(
        {
            (POOLED, "falcon", "lookup"): 11 / 9,
            (POOLED, "falcon5", "lookup"): 11 / 6,
            (POOLED, "falcon5", "falcon"): 9 / 6,
            ("gsm8k", "falcon", "lookup"): 9 / 5,
            ("gsm8k", "falcon5", "lookup"): 9 / 2,
            ("gsm8k", "falcon5", "falcon"): 2.5,
            ("mt_bench", "falcon", "lookup"): 0.5,
            ("mt_bench", "falcon5", "lookup"): 0.5,
            ("mt_bench", "falcon5", "falcon"): 1.0,
        }
    )


def test_rivals_that_are_ahead_on_a_set_are_named_though_another_is_best() -> None:
    rows = standings([run for run in runs() if run["method"] != "falcon5"], ["falcon"])

    assert {row["set"]: row["ahead"] for row in rows} == {
        POOLED: "none",
        "gsm8k": "eagle 1.25",
        "mt_bench": "lookup 2.00",
    }


def test_without_rivals_only_drafters_of_ours_stand_beside_each_other() -> None:
    alone = [run for run in runs() if run["method"] in {"target", "falcon", "falcon5"}]

    assert {(row["method"], row["other"]) for row in standings(alone, ["falcon", "falcon5"])} == {
        ("falcon5", "falcon")
    }


def test_the_table_shows_the_best_rival_on_all_sets_together() -> None:
    text = standings_table(standings(runs(), ["falcon", "falcon5"]))

    assert "| greedy | falcon5 | lookup | 1.83 (" in text
    assert "| greedy | falcon | lookup | 1.22 (" in text
    assert len(text.splitlines()) == 2 + 2
