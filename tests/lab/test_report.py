"""Tables come from results and stand between the markers of a document."""

from pathlib import Path

import pytest

from lab.report import markers, write_between_markers
from lab.tables import fill, source_line, table
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.provenance import provenance


def test_tables_replace_what_stood_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    begin, end = markers("parity")
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")

    write_between_markers(
        document, ["| a |", source_line({"provenance": provenance(seed=0)}, "results/a.json")], "parity"
    )

    text = document.read_text(encoding="utf-8")
    assert "| a |\n\nSource: `results/a.json`; commit `" in text
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_a_document_without_markers_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("no markers", encoding="utf-8")

    with pytest.raises(OptionError, match=r"README\.md` must hold the lines"):
        write_between_markers(document, ["a table"])


def test_a_cell_lacks_nothing_or_is_a_dash() -> None:
    row = {"name": "a|b\nc", "parts": [1.0, 2.0], "cost": {"bytes": 3 * 2**20}, "none": None, "set": "mt_bench"}

    assert fill("{parts:.1f} and {parts:10*~.0f}, {cost/bytes:MiB}", row) == "1.0 2.0 and 10 to 20, 3.0"
    assert fill("{set:set} {parts/1}", row) == "MT-Bench 2.0"
    assert [fill(text, row) for text in ("{none:.2f}x", "{absent}", "{name} {cost/absent}")] == ["-"] * 3
    assert table({"name": "{name}"}, [row]).splitlines()[-1] == "| a\\|b c |"
