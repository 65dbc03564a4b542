"""Rows are what the turns of a cell come to."""

from typing import Any

import pytest

from benchmarks.on_gpu import rows
from benchmarks.on_gpu.cells import EMBEDDED, PLAIN, Cell, Way


def test_rows_are_sums_over_turns_beside_the_first_way_in_the_same_turns() -> None:
    def record(turn: int, way: Way, seconds: float, **more: Any) -> dict[str, Any]:
        counts = {
            "num_steps": 4,
            "num_row_steps": 4,
            "num_accepted": 6,
            "num_tokens": 11,
            "floor_bytes": 50.0,
            "bandwidth": 100.0,
        }
        rest = {
            "is_captured": True,
            "peak_bytes": None,
            "capture_seconds": 0.25,
            "warm_up_capture_seconds": 0.5,
            "num_captures": 0,
            "warm_up_num_captures": 3,
        }
        times = {
            "seconds": seconds,
            "decode_seconds": seconds - 1,
            "phases": {"read": 2.0, "accept": 1.0},
            "notes": [],
        }
        return {"cell": "both", "turn": turn, "way": way.name, **counts, **rest, **times, **more}

    cell = Cell("both", "7b", (PLAIN, Way(EMBEDDED, captures=True)), num_turns=2)
    taken = [record(0, PLAIN, 11.0), record(1, PLAIN, 11.0), record(0, cell.ways[1], 5.0)]

    plain, drafted = rows.cell_result(cell, taken, {})["rows"]

    assert (plain["ratio"], plain["tokens_per_second"], plain["is_complete"]) == (1.0, 1.0, True)
    assert (drafted["ratio"], drafted["is_complete"]) == (2.2, False)
    assert (drafted["acceptance_length"], drafted["step_seconds"]) == (2.5, 1.0)
    assert (drafted["step_over_phases"], drafted["step_over_floor"]) == (pytest.approx(4 / 3), 2.0)
    assert (plain["capture_seconds"], plain["num_captures"]) == (1.0, 3)
    assert drafted["waiting_share"] == pytest.approx(0.25)
    assert (plain["fell_back"], drafted["fell_back"]) == (False, False)

    taken[-1]["uncaptured"] = ["it asks the host"]  # of a step whose other work is captured
    assert [row["fell_back"] for row in rows.cell_result(cell, taken, {})["rows"]] == [False, True]
