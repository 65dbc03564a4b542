"""Goals check themselves: met, missed, or not measured."""

from typing import Any

import pytest

from benchmarks.on_gpu import goals, texts
from benchmarks.on_gpu.cells import Way, cells


def row(way: Way, **changes: Any) -> dict[str, Any]:
    """A complete row in which everything is 1."""
    numbers = ("ratio", "tokens_per_second", "step_over_floor", "step_over_phases", "step_seconds")
    intervals = {f"{name}_interval": [0.9, 1.1] for name in numbers[:2]}
    flags = {"is_complete": True, "is_captured": way.captures is True, "fell_back": False}
    counted = {"verdicts": dict.fromkeys(texts.VERDICTS, 0)}
    return {"way": way.name, **dict.fromkeys(numbers, 1.0), **intervals, **flags, **counted, **changes}


def measured_cells(**changes: Any) -> list[dict[str, Any]]:
    """All cells, every way of which has a row; `changes` go to all rows."""
    found = []
    for cell in cells():
        of_cell = [row(way, **changes) for way in cell.ways]
        found.append({**cell.describe(), "rows": of_cell})
    return found


def test_goals_are_met_or_missed_by_what_was_measured() -> None:
    cells_ = measured_cells()

    before = {goal["what"]: goal for goal in goals.check_goals(cells_, on_cuda=True)}
    cells_[0]["rows"][-1] |= {"ratio": 2.41, "ratio_interval": [2.3, 2.5], "step_over_floor": 1.81}
    after = {goal["what"]: goal for goal in goals.check_goals(cells_, on_cuda=True)}

    first = "embedded Falcon beside captured, compiled plain decoding, T = 0"
    assert (before[first]["state"], before[first]["measured"]) == (goals.MISSED, 1.0)
    assert (after[first]["state"], after[first]["measured"], after[first]["interval"]) == (goals.MET, 2.41, [2.3, 2.5])
    floor_goal = "a compiled step over the memory floor"
    assert (before[floor_goal]["state"], after[floor_goal]["state"]) == (goals.MET, goals.MISSED)
    assert goals.NOT_MEASURED not in {goal["state"] for goal in before.values()}


@pytest.mark.parametrize(
    ("changes", "on_cuda"),
    [({}, False), ({"is_complete": False}, True), ({"fell_back": True, "is_captured": False}, True)],
)
def test_a_goal_counts_on_cuda_alone_in_complete_cells_of_steps_that_were_captured(
    changes: dict[str, Any], on_cuda: bool
) -> None:
    found = goals.check_goals(measured_cells(**changes), on_cuda=on_cuda)

    assert {goal["state"] for goal in found} == {goals.NOT_MEASURED}


def test_a_goal_of_one_shape_is_not_met_by_another() -> None:
    cells_ = [{**cell, "shape": "0.3b"} for cell in measured_cells(ratio=9.0)]

    found = {goal["what"]: goal["state"] for goal in goals.check_goals(cells_, on_cuda=True)}

    assert found["8 rows, embedded Falcon beside captured plain decoding"] == goals.NOT_MEASURED


def test_texts_that_differ_miss_their_goal() -> None:
    cells_ = measured_cells()
    cells_[0]["rows"][0]["verdicts"]["different"] = 1

    found = {goal["what"]: goal["state"] for goal in goals.check_goals(cells_, on_cuda=True)}

    assert found["texts of captured steps that differ without a near tie"] == goals.MISSED
