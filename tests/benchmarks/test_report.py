"""Every page of this repository holds what its results files say."""

import re
from pathlib import Path

import pytest

from benchmarks import batches, verifiers
from benchmarks.report import speed_by_set
from benchmarks.report.__main__ import ROOT, declared, pages
from lab.report import markers
from transformers_falcon_spec.provenance import provenance


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[str]]:
    """The tables of every page."""
    return pages()


@pytest.mark.parametrize("page", sorted({"README.md", *(report.page for report in declared())}))
def test_a_page_holds_what_the_results_files_say(page: str, rendered: dict[str, list[str]]) -> None:
    document, _, name = page.partition("#")
    begin, end = markers(name)
    shipped = (ROOT / document).read_text(encoding="utf-8")

    assert shipped.partition(f"{begin}\n")[2].partition(f"\n{end}")[0] == "\n\n".join(rendered[page])


def test_every_page_with_markers_is_declared() -> None:
    found = set()
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.md")):
        page = str(path.relative_to(ROOT))
        names = re.findall(r"^<!-- results:begin ?(\w*) -->$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        found |= {f"{page}#{name}" if name else page for name in names}

    assert found == {"README.md", *(report.page for report in declared())}


def test_every_results_file_has_a_reader() -> None:
    files = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}

    assert files <= {Path(file).stem for report in declared() for file in report.files}


def test_methods_have_a_line_for_each_way_of_decoding_and_a_column_for_each_set() -> None:
    measured = {"speedup": 1.25, "speedup_interval": [1.0, 1.5], "acceptance_length_pooled": 2.5, "decoding": "greedy"}
    rows = [
        {**measured, "method": "eagle", "set": "gsm8k"},
        {**measured, "method": "eagle", "set": "mt_bench", "speedup": 1.5},
        {**measured, "method": "falcon", "set": "gsm8k", "decoding": "temperature-0.7"},
        {"method": "failed", "set": "gsm8k", "decoding": "greedy"},
    ]

    greedy, sampled = speed_by_set({"rows": rows})

    assert greedy.splitlines() == [
        "| greedy | GSM8K | MT-Bench |",
        "| --- | --- | --- |",
        "| eagle | 1.25x (1.00 to 1.50), 2.50 tokens | 1.50x (1.00 to 1.50), 2.50 tokens |",
    ]
    assert sampled.splitlines()[2:] == ["| falcon | 1.25x (1.00 to 1.50), 2.50 tokens | - |"]


def test_verifiers_stand_by_set_with_what_a_step_costs() -> None:
    row = {
        "method": "gumbel",
        "set": "gsm8k",
        "acceptance_length_pooled": 2.25,
        "acceptance_length_pooled_interval": [2.0, 2.5],
        "step_cost": 1.9,
        "speedup": 1.21,
        "speedup_interval": [1.1, 1.3],
    }

    text = verifiers.REPORT.render({"provenance": provenance(seed=0), "rows": [row]}, "verifiers.json")

    assert "| `gumbel` | GSM8K | 2.25 (2.00 to 2.50) | 1.90 | 1.21x (1.10 to 1.30) |" in text
    assert "Source: `benchmarks/results/verifiers.json`; commit `" in text


def test_batches_stand_by_size_and_by_who_chooses_what_is_drafted() -> None:
    summary = {
        "tokens_per_second": 80.0,
        "num_identical": 7,
        "num_rows": 8,
        "speedup": 1.21,
        "speedup_interval": [1.1, 1.3],
        "acceptance_length": 2.25,
    }
    row = {
        "size": 4,
        "target_tokens_per_second": 100.4,
        "tuned": summary,
        "every_step": {**summary, "num_identical": 6},
    }

    text = batches.REPORT.render({"provenance": provenance(seed=0), "rows": [row]}, "batches.json")

    assert "| 4 | 100 tokens/s | as the tuner chooses | 80 | 1.21 (1.10 to 1.30) | 2.25 | 7/8 |" in text
    assert "| 4 | 100 tokens/s | in every step | 80 | 1.21 (1.10 to 1.30) | 2.25 | 6/8 |" in text


def test_parity_is_one_table_of_all_files() -> None:
    row = {"decoding": "greedy", "num_prompts": 200, "identical": 199, "tie": 1, "bug": 0, "tokens_per_step": 2.5}
    results = {
        file: {"provenance": provenance(seed=0, dtype=dtype), "rows": [row]}
        for file, dtype in (("parity.json", "float32"), ("parity_bfloat16.json", "bfloat16"))
    }
    (report,) = (report for report in declared() if report.page.endswith("#parity"))

    rows, sources = report.render_all(results)

    assert rows.splitlines()[2:] == [
        "| test prompts | float32 | greedy | 2.50 | 199 of 200 | 1 | 0 |",
        "| test prompts | bfloat16 | greedy | 2.50 | 199 of 200 | 1 | 0 |",
    ]
    assert "`benchmarks/results/parity.json` (commit `" in sources
    assert "; `benchmarks/results/parity_bfloat16.json` (commit `" in sources
    assert report.render_all({}) == []
