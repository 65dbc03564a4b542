"""The matrix of architectures comes from its results file and stands between the markers."""

import json
from pathlib import Path
from typing import Any

from tests.families import FAMILIES
from transformers_falcon_spec import cli
from transformers_falcon_spec.evaluation.report import BEGIN, END, render_into
from transformers_falcon_spec.provenance import provenance

ROOT = Path(__file__).parents[2]


def _row(family: str, attention: str, verdict: str, **fields: Any) -> dict[str, Any]:
    return {"family": family, "config": "SomeConfig", "attention": attention, "verdict": verdict, **fields}


def _results(folder: Path) -> Path:
    texts = {"num_tokens": 48, "num_equal": 48, "acceptance_length": 1.5}
    errors = {"tree_error": 2e-6, "control_error": 4.0}
    rows = [
        _row("llama", "eager", "tree", **errors, **texts),
        _row("llama", "sdpa", "tree", **errors, **{**texts, "num_equal": 47, "acceptance_length": 2.0}),
        _row("gptj", "eager", "tree", **errors, **texts),
        _row("gptj", "sdpa", "not offered"),
        _row("bloom", "eager", "chain", reason="off", **texts),
        _row("mamba", "eager", "refused", reason="recurrent"),
    ]
    result = {"provenance": provenance(seed=0), "rows": rows}
    (folder / "architectures.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


def test_each_verdict_has_a_table_with_one_line_for_a_family(tmp_path: Path) -> None:
    document = tmp_path / "architectures.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")

    render_into(document, _results(tmp_path))

    text = document.read_text(encoding="utf-8")
    assert "| llama | `SomeConfig` | 2e-06 / 4e+00 | 2e-06 / 4e+00 | 95/96 | 1.50, 2.00 |" in text
    assert "| gptj | `SomeConfig` | 2e-06 / 4e+00 | - | 48/48 | 1.50 |" in text
    assert "| bloom | `SomeConfig` | 48/48 | 1.50 |" in text
    assert "| mamba | `SomeConfig` | eager |" in text
    assert [line for line in text.splitlines() if line.startswith("###")] == [
        "### Tree: 2 families",
        "### Chain: 1 family",
        "### Refused: 1 family",
    ]
    assert "Source: `benchmarks/results/architectures.json`; commit `" in text
    assert text.startswith("before\n")
    assert "old" not in text


def test_the_report_command_renders_the_matrix_into_its_own_page(tmp_path: Path) -> None:
    document, page = tmp_path / "README.md", tmp_path / "architectures.md"
    for path in (document, page):
        path.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")

    status = cli.main(["report", "--results", str(_results(tmp_path)), "--documents", str(document), str(page)])

    assert status == 0
    assert "### Tree: 2 families" in page.read_text(encoding="utf-8")
    assert "### Tree" not in document.read_text(encoding="utf-8")


def test_another_version_is_told_in_short(tmp_path: Path) -> None:
    document = tmp_path / "architectures.md"
    document.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    (_results(tmp_path) / "architectures.json").rename(tmp_path / "architectures_oldest.json")

    render_into(document, tmp_path)

    assert "2 tree, 1 chain, 1 refused; 191 of 192 tokens equal." in document.read_text(encoding="utf-8")


def test_the_stored_matrix_holds_every_family_with_its_verdict_and_no_other_token() -> None:
    rows = json.loads((ROOT / "benchmarks/results" / "architectures.json").read_text(encoding="utf-8"))["rows"]

    offered = [row for row in rows if row["verdict"] != "not offered"]
    assert {row["family"]: row["verdict"] for row in offered} == {
        name: family.verdict for name, family in FAMILIES.items()
    }
    assert {(row["family"], row["attention"]) for row in rows} == {
        (name, attention) for name in FAMILIES for attention in ("eager", "sdpa")
    }
    verified = [row for row in offered if row["verdict"] != "refused"]
    assert all(row["num_equal"] == row["num_tokens"] > 0 and row["acceptance_length"] > 1 for row in verified)
