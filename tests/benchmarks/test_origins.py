"""A table of results of several commits or drafters is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import __main__ as report
from benchmarks.report.origins import check_one_commit, check_one_drafter
from benchmarks.report.overview import PARITY, overview
from benchmarks.running import check_commit
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.provenance import provenance


def _result(weights: str = "12", commits: tuple[str, ...] = ("ab",), dtype: str = "float32") -> dict[str, Any]:
    method = {"target": "target", "method": "falcon", "weights": weights, "commits": list(commits)}
    return {
        "provenance": {"dtype": dtype},
        "methods": [{"target": "target", "method": "target", "weights": None}, method],
    }


def test_runs_of_one_commit_pass_and_files_that_name_none() -> None:
    check_one_commit(_result(), "x.json")
    check_one_commit({"provenance": {}, "methods": [{"method": "falcon"}]}, "x.json")


def test_runs_of_several_commits_are_refused() -> None:
    with pytest.raises(OptionError, match=r"those of `x.json` are of \['ab', 'cd'\]. Delete `x.jsonl`"):
        check_one_commit(_result(commits=("ab", "cd")), "x.json")


def test_runs_of_another_commit_are_not_gone_on_with(tmp_path: Path) -> None:
    runs = tmp_path / "race.jsonl"
    check_commit(runs)
    lines = [{"settings": {}}, {"commit": provenance()["commit"]}, {}]
    runs.write_text("\n".join(map(json.dumps, lines)) + '\n{"commit": "cut', encoding="utf-8")
    check_commit(runs)

    runs.write_text(json.dumps({"commit": "ab"}), encoding="utf-8")

    with pytest.raises(OptionError, match=r"`race.jsonl` must hold runs of one commit, but it has some of \['ab'\]"):
        check_commit(runs)


def test_cases_of_several_commits_are_refused() -> None:
    cases = [{"provenance": {"commit": commit}} for commit in ("ab", "cd")]

    with pytest.raises(OptionError, match="must be of one commit"):
        check_one_commit({"provenance": {}, "cases": cases}, "x.json")


def test_another_drafter_under_the_same_name_is_refused_in_the_same_type() -> None:
    check_one_drafter({"cpu.json": _result(), "gpu.json": _result()})
    check_one_drafter({"cpu.json": _result(), "gpu.json": _result("34", dtype="bfloat16")})

    with pytest.raises(OptionError, match=r"its weights are 12 in `cpu.json` and 34 in `gpu.json`. Measure the older"):
        check_one_drafter({"cpu.json": _result(), "gpu.json": _result("34")})


def test_the_readme_counts_texts_of_one_drafter(tmp_path: Path) -> None:
    for name, weights in zip(PARITY[:2], ("12", "34"), strict=True):
        origin = provenance(seed=0, dtype="float32", drafter="models/falcon", drafter_weights=weights)
        (tmp_path / name).write_text(json.dumps({"provenance": origin, "rows": []}), encoding="utf-8")

    with pytest.raises(OptionError, match=r"one drafter `models/falcon in float32`"):
        overview(tmp_path)


def test_no_page_is_rendered_from_mixed_runs(tmp_path: Path) -> None:
    (tmp_path / "race.json").write_text(json.dumps(_result(commits=("ab", "cd"))), encoding="utf-8")

    with pytest.raises(OptionError, match=r"`race.json` are of"):
        report.pages(tmp_path)


def test_a_page_without_results_has_no_tables(tmp_path: Path) -> None:
    assert not any(report.pages(tmp_path).values())
