"""What a training step costs: the middle run of each variant, beside the first turn by turn, in a table; two processes are started as two."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training_speed as script
from transformers_falcon_spec.provenance import provenance


def recorded(tokens_per_second: float, peak: int = 2**30) -> dict[str, Any]:
    return {"train_tokens_per_second": tokens_per_second, "peak_process_bytes": peak}


def test_variants_are_held_beside_the_first_turn_by_turn() -> None:
    first, second, *others = script.VARIANTS
    turns = [
        {
            first: recorded(100.0),
            second: recorded(300.0, peak=3 * 2**30),
            **dict.fromkeys(others, recorded(100.0)),
        },
        {first: recorded(200.0), second: recorded(400.0), **dict.fromkeys(others, recorded(200.0))},
        {first: recorded(150.0), second: recorded(375.0), **dict.fromkeys(others, recorded(150.0))},
    ]

    rows = script.rows_of(turns)

    assert [row["name"] for row in rows] == [*script.VARIANTS]
    assert (rows[0]["tokens_per_second"], rows[0]["ratio"]) == (150.0, 1.0)
    assert (rows[1]["tokens_per_second"], rows[1]["peak_process_bytes"]) == (375.0, 3 * 2**30)
    assert rows[1]["ratio"] == pytest.approx(2.5)  # of 3, 2 and 2.5
    text = script.REPORT.render(
        {"provenance": provenance(seed=0, steps=60, repeats=3), "rows": rows}, "training_speed.json"
    )
    assert "60 steps of 8 conversations, one thread a process, medians of 3 runs" in text
    assert f"| {second} | 375 | 3.0 GiB | 2.50 (2.00 to 3.00) |" in text


@pytest.mark.parametrize("name", [*script.VARIANTS])
def test_a_variant_is_run_as_its_name_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    def run(arguments: list[str], log: Path) -> int:
        runs.append(arguments)
        log.parent.mkdir(parents=True)
        curve = [{"train_tokens_per_second": 4.0}, {"train_tokens_per_second": 5.0}, {"loss": 1.0}]
        (log.parent / "training.json").write_text(json.dumps({"curve": curve}), encoding="utf-8")
        return 2**30

    monkeypatch.setattr(script, "peak_of", run)
    args = argparse.Namespace(target="T", data="D", limit=9, steps=7)

    assert script.train(name, tmp_path, args, tmp_path / "features") == recorded(5.0)

    (command,) = runs
    is_double, from_disk = "two processes" in name, "from disk" in name
    assert is_double == ("--nproc_per_node" in command)
    assert ("--cache_features" in command) == from_disk
    assert command[command.index("--per_device_train_batch_size") + 1] == ("4" if is_double else "8")


def test_the_memory_of_a_run_is_that_of_its_process(tmp_path: Path) -> None:
    log = tmp_path / "run" / "log.txt"
    least = script.peak_of(["-c", "print('small')"], log)

    found = script.peak_of(["-c", f"print(len(b'a' * {least + 2**27}))"], log)

    assert least + 2**27 < found < least + 2**28
    assert log.read_text("utf-8").split() == ["small", str(least + 2**27)]
    with pytest.raises(subprocess.CalledProcessError):
        script.peak_of(["-c", "raise SystemExit(3)"], log)
