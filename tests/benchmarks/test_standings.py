"""The best rival is one method over all prompt sets, and who is ahead is named."""

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


def test_drafters_of_ours_stand_beside_the_best_rival() -> None:
    rows = standings(runs(), ["falcon", "falcon5"])

    found = {(row["set"], row["method"], row["other"]): row["ratio"] for row in rows}
    assert found == pytest.approx({(POOLED, "falcon", "lookup"): 11 / 9, (POOLED, "falcon5", "lookup"): 11 / 6})


def test_rivals_that_are_ahead_are_named_with_the_fastest_first() -> None:
    slow = [{**run, "seconds": 6.5} if run["method"] == "falcon" else run for run in runs()]

    (row,) = standings([run for run in slow if run["method"] != "falcon5"], ["falcon"])

    assert row["ahead"] == "lookup 1.18, eagle 1.08"


def test_without_rivals_nothing_stands_beside_anything() -> None:
    alone = [run for run in runs() if run["method"] in {"target", "falcon", "falcon5"}]

    assert standings(alone, ["falcon", "falcon5"]) == []


def test_the_table_shows_the_best_rival_on_all_sets_together() -> None:
    text = standings_table(standings(runs(), ["falcon", "falcon5"]))

    assert "| greedy | falcon5 | lookup | 1.83 (" in text
    assert "| greedy | falcon | lookup | 1.22 (" in text
    assert len(text.splitlines()) == 2 + 2
