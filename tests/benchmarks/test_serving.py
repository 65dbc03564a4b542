"""The load on the server: texts are those of calls of their own, nothing is stuck and nothing stays; and what the page shows of it."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serving
from transformers_falcon_spec.provenance import provenance
from transformers_falcon_spec.records import Records

pytestmark = pytest.mark.usefixtures("machine_clock")


def args_of(*words: str) -> argparse.Namespace:
    return serving.options().parse_args(words)


def checked(row: dict[str, Any], num_requests: int) -> None:
    assert row["different"] == []
    assert row["num_identical"] == row["num_answered"] > 0
    assert row["num_wrong_status"] == 0
    assert row["num_answered"] + row["num_left"] + row["num_refused"] == num_requests
    assert set(row["left_behind"].values()) == {0}


@pytest.mark.slow  # the proof: minutes
def test_200_requests_from_8_clients_have_their_own_texts_and_leave_nothing(tmp_path: Path) -> None:
    row = serving.measured(args_of(), Records(tmp_path / "serving.jsonl", {}))

    checked(row, 200)
    assert row["num_left"] > 10
    assert row["num_refused"] > 10


def test_the_plan_is_the_same_for_clients_and_for_the_comparison_and_holds_every_kind() -> None:
    asks = serving.plan(200, 96)

    assert asks == serving.plan(200, 96)
    assert {ask.does for ask in asks} == {*serving.SHARES}
    assert {ask.status for ask in asks} == {200, 400, 404}
    assert any("seed" in ask.body for ask in asks)
    assert any("stop" in ask.body for ask in asks)


def test_the_table_shows_what_was_measured() -> None:
    numbers = {"num_clients": 8, "num_answered": 150, "num_left": 20, "num_refused": 30, "num_identical": 149}
    row = {**numbers, "tokens_per_second": 200.4, "tokens_per_second_one_by_one": 120.6}

    text = "\n".join(serving.tables({"provenance": provenance(seed=0), "rows": [row]}, "serving.json"))

    assert "| 8 | 150 | 20 | 30 | 149/150 | 200 tokens/s | 121 tokens/s |" in text
