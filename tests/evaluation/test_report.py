"""Tables come from results files and stand between the markers."""

import json
from pathlib import Path

import pytest

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.report import BEGIN, END, render_into
from transformers_falcon_spec.provenance import provenance


def test_tables_replace_what_stood_between_the_markers(tmp_path: Path) -> None:
    results, document = tmp_path / "results", tmp_path / "README.md"
    results.mkdir()
    row = {"decoding": "greedy", "num_prompts": 200, "num_tokens": 25000, "identical": 199, "tie": 1, "different": 0}
    result = {"provenance": provenance(seed=0), "rows": [row]}
    (results / "parity.json").write_text(json.dumps(result), encoding="utf-8")
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")

    render_into(document, results)

    text = document.read_text(encoding="utf-8")
    assert "| greedy | 200 | 25000 | 199 | 1 | 0 |" in text
    assert "Source: `benchmarks/results/parity.json`; commit `" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_a_document_without_markers_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("no markers", encoding="utf-8")

    with pytest.raises(OptionError, match=r"README\.md` must hold the lines"):
        render_into(document, tmp_path)
