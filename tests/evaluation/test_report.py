"""Tables come from results files and stand between the markers."""

import json
from pathlib import Path

import pytest

from transformers_falcon_spec import cli
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.report import BEGIN, END, tables_of, write_between_markers
from transformers_falcon_spec.evaluation.tables import fill, table
from transformers_falcon_spec.provenance import provenance


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with the results of a parity check, and a file that no command wrote."""
    folder = tmp_path / "results"
    folder.mkdir()
    row = {"decoding": "greedy", "num_prompts": 200, "num_tokens": 25000, "identical": 199, "tie": 1, "bug": 0}
    row["tokens_per_step"] = 2.5
    result = {"provenance": provenance(seed=0, dtype="float32", max_new_tokens=64), "rows": [row]}
    (folder / "parity.json").write_text(json.dumps(result), encoding="utf-8")
    (folder / "other.json").write_text('{"rows": [{"bug": 1}]}', encoding="utf-8")
    return folder


def test_tables_replace_what_stood_between_the_markers(results: Path, tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")

    assert cli.main(["report", "--results", str(results), "--documents", str(document)]) == 0

    text = document.read_text(encoding="utf-8")
    assert "### The same text: parity\n" in text
    assert "At most 64 new tokens a text, float32." in text
    assert "| greedy | 200 | 25000 | 2.50 | 199 | 1 | 0 |" in text
    assert "Source: `.../results/parity.json`; commit `" in text  # portable
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")


def test_a_document_without_markers_is_refused(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("no markers", encoding="utf-8")

    with pytest.raises(OptionError, match=r"README\.md` must hold the lines"):
        write_between_markers(document, ["a table"])


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"rows": []}', '{"provenance": {}, "rows": [{}]}'])
def test_a_file_that_no_command_wrote_has_no_tables(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, document = tmp_path / "other.json", tmp_path / "README.md"
    document.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    path.write_text(content, encoding="utf-8")

    assert tables_of(path) is None
    assert cli.main(["report", "--results", str(path), "--documents", str(document)]) == 1
    assert "must hold results of `bench`, `parity` or `calibrate`, but it holds none" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--results", "speed.json"], ["--documents", "README.md"]])
def test_a_report_of_nothing_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", *options]) == 1
    assert "needs something to render" in capsys.readouterr().err


def test_a_cell_lacks_nothing_or_is_a_dash() -> None:
    row = {"name": "a|b\nc", "parts": [1.0, 2.0], "cost": {"bytes": 3 * 2**20}, "none": None, "set": "mt_bench"}

    assert fill("{parts:.1f} and {parts:10*~.0f}, {cost/bytes:MiB}", row) == "1.0 2.0 and 10 to 20, 3.0"
    assert fill("{set:set} {parts/1}", row) == "MT-Bench 2.0"
    assert [fill(text, row) for text in ("{none:.2f}x", "{absent}", "{name} {cost/absent}")] == ["-"] * 3
    assert table({"name": "{name}"}, [row]).splitlines()[-1] == "| a\\|b c |"


@pytest.mark.parametrize("missing", ["results", "documents"])
def test_a_missing_file_is_told_before_anything_is_written(
    missing: str, results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "document.md"
    document.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    files = {"results": str(results), "documents": str(document)} | {missing: str(tmp_path / "nowhere.json")}

    assert cli.main(["report", "--results", files["results"], "--documents", str(document), files["documents"]]) == 1

    assert f"`{missing}` must name files" in capsys.readouterr().err
    assert document.read_text(encoding="utf-8") == f"{BEGIN}\n{END}\n"
