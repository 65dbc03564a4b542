"""The benchmark of the captured step: what it needs, that it stops in good order and goes on, and what its page says."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu as script
from benchmarks.on_gpu import floor, goals, phases, runs, texts
from benchmarks.on_gpu.cells import EMBEDDED, cells
from tests.benchmarks.on_gpu.tiny_pair import models
from tests.fake_cuda import FakeGraph, fake_cuda
from transformers_falcon_spec.provenance import provenance

__all__ = ["fake_cuda", "models"]
ROOT = Path(__file__).parents[2]


def command(models: Path, output: Path, *more: str) -> list[str]:
    """A call of the script that takes seconds."""
    common = ["--device", "cpu", "--shape", "small", "--max_new_tokens", "6", "--turns", "2"]
    return ["--models", str(models), "--output", str(output), *common, *more]


@pytest.fixture(autouse=True)
def _few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PER_SET", 2)
    monkeypatch.setattr(floor, "BYTES", {"cpu": 2**12})


def test_a_call_measures_what_is_left_and_the_page_says_what_it_is(models: Path, tmp_path: Path) -> None:
    output = tmp_path / "results" / "gpu.json"
    asked = command(models, output, "--cells", "first, greedy", "falcon5, greedy")

    script.main(asked)
    written = output.with_suffix(".jsonl").read_text("utf-8")
    script.main(asked)

    assert output.with_suffix(".jsonl").read_text("utf-8") == written
    result = json.loads(output.read_text("utf-8"))
    (first,) = result["cells"]  # none of `falcon5`, which is not at hand
    assert [row["way"] for row in first["rows"]] == [way.name for way in next(cells()).ways if not way.compiles]
    assert all(row["verdicts"] == {**dict.fromkeys(texts.VERDICTS, 0), "identical": 2} for row in first["rows"])
    assert {row["way"]: row["is_captured"] for row in first["rows"] if row["who"] == EMBEDDED} == {
        f"{EMBEDDED}, uncaptured": False,
        f"{EMBEDDED}, captured": True,
    }
    assert not any(row["is_complete"] for row in first["rows"])  # two turns of twelve
    assert {goal["state"] for goal in result["goals"]} == {goals.NOT_MEASURED}
    page = script.REPORT.render(result, "gpu_cpu.json")
    assert "### Tried without a GPU: CPU, " in page
    assert "nothing is captured or compiled here" in page
    num_texts = sum(sum(row["verdicts"].values()) for cell in result["cells"] for row in cell["rows"])
    assert f"{num_texts} of {num_texts} texts are identical." in page
    assert "tokens/s" not in page


def test_time_that_is_over_stops_between_turns_and_the_next_call_goes_on(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, now = tmp_path / "gpu.json", [0.0]
    take = runs.CellRun._take

    def slow(self: Any, *args: Any) -> None:
        take(self, *args)
        now[0] += 40

    monkeypatch.setattr(runs.CellRun, "_take", slow)
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    calls = command(models, output, "--cells", "first, ", "--minutes", "1", "--turns", "3")
    files = []

    for _ in range(4):
        script.main(calls)
        files.append(output.with_suffix(".jsonl").read_text("utf-8").splitlines())

    assert [len(file) for file in files] == [1 + 2 * 5, 1 + 4 * 5, 1 + 6 * 5, 1 + 6 * 5]
    assert [files[3][: len(file)] for file in files] == files
    rows_ = map(json.loads, files[3][1::5])
    assert [(row["cell"], row["turn"]) for row in rows_] == [
        (f"first, {decoding}", turn) for decoding in ("greedy", "temperature-1") for turn in range(3)
    ]


def test_nothing_on_the_way_needs_datasets_or_evaluate(models: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('datasets', 'evaluate', 'matplotlib', 'tensorboard'): sys.modules[name] = None\n"
        "from benchmarks import gpu\n"
        "gpu.main(sys.argv[1:])\n"
    )
    asked = command(models, tmp_path / "gpu.json", "--cells", "first, greedy", "--turns", "1")

    done = subprocess.run([sys.executable, "-c", code, *asked], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "gpu.json").read_text("utf-8"))["cells"][0]["rows"]) == 5


def test_the_tests_for_a_gpu_start_where_only_torch_and_transformers_are() -> None:
    code = (
        "import sys\n"
        "for name in ('beartype', 'datasets', 'evaluate', 'fastapi', 'uvicorn', 'matplotlib', 'tensorboard'):\n"
        "    sys.modules[name] = None\n"
        "import pytest\n"
        "sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-p', 'no:cacheprovider']))\n"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
    assert "test_a_step_waits_for_the_device_once" in done.stdout
    assert "shapes are not checked" in done.stdout


def test_the_script_runs_with_captured_work(
    models: Path, tmp_path: Path, fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "watched_work", lambda _device: phases.watched_work(torch.device("cuda")))
    output = tmp_path / "gpu.json"

    script.main(command(models, output, "--cells", "first, ", "batch 8"))

    result = json.loads(output.read_text("utf-8"))
    captured = [row for cell in result["cells"] for row in cell["rows"] if row["is_captured"]]
    assert len(captured) == 2 * 2 + 2
    assert all(row["phases_by"] == phases.EVENTS for row in captured)
    assert all(bool(row["num_captures"]) == bool(row["capture_seconds"]) for row in captured)
    assert fake_cuda.made == sum(row["num_captures"] for row in captured) > 0
    assert all(set(row["phases"]) >= {"read", "accept"} and row["step_over_phases"] > 1 for row in captured)
    for row in captured:
        assert row["verdicts"]["identical"] == sum(row["verdicts"].values())


def test_a_measured_gpu_has_a_plot_and_tables_of_times() -> None:
    numbers = dict.fromkeys(
        ("ratio", "acceptance_length", "step_seconds", "floor_seconds", "waiting_share", "capture_seconds"), 0.5
    )
    row = {
        **numbers,
        "ratio_interval": [0.25, 0.75],
        "who": EMBEDDED,
        "fell_back": False,
        "notes": [],
    }
    row |= {"phases": {"read": 0.001}, "peak_bytes": 2**30, "verdicts": None}
    ways = {"plain, captured": (50.0, [40.0, 60.0]), f"{EMBEDDED}, captured": (100.0, [80.0, 120.0])}
    rows = [
        {**row, "way": way, "tokens_per_second": rate, "tokens_per_second_interval": ends}
        for way, (rate, ends) in ways.items()
    ]
    cell = {**next(cells()).describe(), "num_turns": 12, "failures": {}, "rows": rows}
    result = {"provenance": {**provenance(seed=0), "device": "GPU X"}, "on_cuda": True, "goals": [], "cells": [cell]}
    spec = importlib.util.spec_from_file_location("figures", ROOT / "tools" / "figures.py")
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)

    page, drawn = script.REPORT.render(result, "gpu.json"), figures.gpu(result)

    assert "### Measured on GPU X" in page
    assert "(figures/gpu.svg)" in page
    assert (
        "| embedded Falcon, captured | 100.0 (80.0 to 120.0) | 0.50 (0.25 to 0.75) | 0.50 | 500.00 | - / 1.00 / - | 500.00 | - | 50% | 1.0 | 0.5 s |"
        in page
    )
    assert "GPU X, shape 7b, greedy" in drawn
    assert 'width="275" height="22"' in drawn  # 100 of 120 tokens on 330 points
    assert 'width="137.5" height="22"' in drawn
