"""What a training step costs: the middle run of each variant, beside the first turn by turn, in a table; two processes are started as two."""

import argparse
import json
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

    def run(folder: Path, *command: str, **how: str) -> None:
        runs.append((command, how))
        folder.mkdir(parents=True)
        (folder / "training.json").write_text(
            json.dumps({"curve": [{"train_tokens_per_second": 4.0}, recorded(5.0), {"loss": 1.0}], **recorded(7.0)}),
            encoding="utf-8",
        )

    monkeypatch.setattr(script, "run_command", run)
    args = argparse.Namespace(target="T", data="D", limit=9, steps=7)

    assert script.train(name, tmp_path, args, tmp_path / "features") == recorded(5.0)

    ((command, how),) = runs
    is_double, from_disk = "two processes" in name, "from disk" in name
    assert (how.get("ACCELERATE_USE_CPU") == "true") == is_double == ("--nproc_per_node" in command)
    assert ("--cache_features" in command) == from_disk
    assert command[command.index("--per_device_train_batch_size") + 1] == ("4" if is_double else "8")
