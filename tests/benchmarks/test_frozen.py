"""Frozen weights beside packed and stock ones: rows are ratios of the same rounds, and a run that was stopped goes on."""

import json
from pathlib import Path

import pytest

from benchmarks import frozen as script
from tests.chat import save_target
from tests.tiny import make_drafter
from transformers_falcon_spec.commands.loading import load_target
from transformers_falcon_spec.provenance import provenance

FACTORS = {script.STOCK: 3.0, script.PACKED: 2.0, script.FROZEN: 1.5}
COMPILED = {"compiled": {"seconds": 60.0, "bytes": 4_000_000}}


def test_costs_are_in_plain_steps_of_the_same_rounds() -> None:
    rounds = [
        {
            "seconds": {
                f"{weights} {work}": plain * FACTORS[weights] ** (work != script.PLAIN)
                for weights, work in script.WORK
            }
        }
        for plain in (0.1, 0.2, 0.3)
    ]

    rows = script.rows_of([COMPILED, *rounds], packed_bytes=5_000_000)

    assert {row["weights"]: row[script.PASS]["cost"] for row in rows} == pytest.approx(FACTORS)
    assert [row["plain_seconds"] for row in rows] == [0.2] * 3
    assert rows[-1]["4"]["cost_interval"] == pytest.approx((1.5, 1.5))  # whatever the machine does between rounds
    case = {"shape": "None", "dtype": "float32", "device": "CPU", "rows": rows}
    origin = provenance(seed=0, dtype="float32", context="200")
    shown = script.tables({"provenance": origin, "cases": [case]}, "frozen.json")[1].splitlines()
    assert shown[2].endswith("| - | - |")
    assert shown[3].endswith("| - | 5 MB |")
    assert shown[4].startswith(
        "| embedded | CPU | 200.0 ms | compiled, frozen | 300.0 ms (150.0 to 450.0), 1.50 (1.50 to 1.50) |"
    )
    assert shown[4].endswith("| 60 s | 4 MB |")


@pytest.mark.slow
@pytest.mark.usefixtures("no_shape_checks")
def test_a_case_is_measured_and_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "BACKEND", "aot_eager")
    target, drafter, output = save_target(tmp_path / "target"), tmp_path / "drafter", tmp_path / "frozen.json"
    make_drafter(load_target(str(target), "float32", "cpu")[0], block_size=2).save_pretrained(drafter)
    command = [
        "--target",
        str(target),
        "--drafter",
        str(drafter),
        "--threads",
        "1",
        "--context",
        "9",
        "--output",
        str(output),
    ]

    script.main([*command, "--repeats", "2"])
    (lines,) = tmp_path.glob("frozen_small_float32_*.jsonl")
    first = lines.read_text("utf-8")
    script.main([*command, "--repeats", "3"])
    script.main([*command, "--repeats", "3"])  # nothing is left to do

    assert lines.read_text("utf-8").startswith(first)
    assert [next(iter(json.loads(line))) for line in lines.read_text("utf-8").splitlines()] == [
        *("compiled", "seconds", "seconds"),
        *("compiled", "seconds"),
    ]
    (case,) = json.loads(output.read_text("utf-8"))["cases"]
    assert [row["weights"] for row in case["rows"]] == [script.STOCK, script.PACKED, script.FROZEN]
    assert "| embedded | CPU, " in script.REPORT.render(json.loads(output.read_text("utf-8")), "frozen.json")
