"""The matrix of architectures as its page shows it: a paragraph for each verdict."""

import json
from pathlib import Path
from typing import Any

from benchmarks.architectures import REPORT
from tests.families import FAMILIES
from transformers_falcon_spec.provenance import provenance

ROOT = Path(__file__).parents[2]


def _row(family: str, attention: str, verdict: str, **fields: Any) -> dict[str, Any]:
    return {"family": family, "config": "SomeConfig", "attention": attention, "verdict": verdict, **fields}


def _result() -> dict[str, Any]:
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
    return {"provenance": provenance(seed=0), "rows": rows}


def test_each_verdict_names_its_families() -> None:
    text = REPORT.render(_result(), "architectures.json")

    assert (
        "**Tree** (2 families): `llama`, `gptj`. 143 of 144 tokens equal. Largest error of a tree: 5e-07 of that"
        in text
    )
    assert "**Chain** (1 family): `bloom`. 48 of 48 tokens equal." in text
    assert "**Refused** (1 family): `mamba`.\n" in text
    assert "Source: `benchmarks/results/architectures.json`; commit `" in text


def test_another_version_is_shown_in_short() -> None:
    text = REPORT.render(_result(), "architectures_oldest.json")

    assert "2 tree, 1 chain, 1 refused; 191 of 192 tokens equal." in text
    assert "###" in text
    assert "llama" not in text


def test_the_stored_matrix_holds_every_family_with_its_verdict_and_no_other_token() -> None:
    rows = json.loads((ROOT / "benchmarks/results" / "architectures.json").read_text(encoding="utf-8"))["rows"]

    offered = [row for row in rows if row["verdict"] != "not offered"]
    assert {row["family"]: row["verdict"] for row in offered} == {
        name: family.form for name, family in FAMILIES.items()
    }
    assert {(row["family"], row["attention"]) for row in rows} == {
        (name, attention) for name in FAMILIES for attention in ("eager", "sdpa")
    }
    verified = [row for row in offered if row["verdict"] != "refused"]
    assert all(row["num_equal"] == row["num_tokens"] > 0 for row in verified)
    assert all((row["acceptance_length"] > 1) == (row["verdict"] != "plain") for row in verified)
