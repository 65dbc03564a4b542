"""`generate`, `bench`, `parity` and `report` through the command line, on a tiny pair saved to disk."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.chat import save_target
from tests.tiny import make_drafter
from transformers_falcon_spec import cli


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target")
    drafter = make_drafter(AutoModelForCausalLM.from_pretrained(target), block_size=2)
    drafter.save_pretrained(folder / "drafter")
    prompts = folder / "sums.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one plus two"}\n{"id": "b", "prompt": "three"}\n', encoding="utf-8")
    return {"target": str(target), "drafter": str(folder / "drafter"), "prompts": str(prompts)}


def test_generate_streams_the_targets_own_text(pair: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    common = ["generate", "--target", pair["target"], "--drafter", pair["drafter"], "--prompt", "one plus two"]

    status = cli.main([*common, "--max_new_tokens", "8"])

    assert status == 0
    assert "one plus two" in capsys.readouterr().out


@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_compare_says_in_its_last_line_that_the_text_is_the_same(
    pair: dict[str, str], temperature: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", pair["prompts"], "--compare", "--max_new_tokens", "8", "--temperature", temperature]

    status = cli.main(["generate", "--target", pair["target"], "--drafter", pair["drafter"], *options])

    out = capsys.readouterr().out
    assert status == 0
    assert out.strip().split("\n")[-1].startswith("The texts are identical on all 2 prompts; with the drafter")
    assert all(word in out for word in ("acceptance length", "verifying", "tokens/s"))


def test_generate_without_a_prompt_says_what_to_give(pair: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["generate", "--target", pair["target"], "--drafter", pair["drafter"]])

    assert status == 1
    assert "give `--prompt TEXT` or `--prompts FILE`" in capsys.readouterr().err


def test_bench_writes_rates_and_where_they_come_from(pair: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    options = ["--prompts", pair["prompts"], "--output", str(output), "--max_new_tokens", "8", "--repeats", "2"]

    status = cli.main(["bench", "--target", pair["target"], "--drafters", f"two={pair['drafter']}", *options])

    result = json.loads(output.read_text(encoding="utf-8"))
    assert status == 0
    assert {row["decoding"] for row in result["rows"]} == {"greedy", "temperature-0.7"}
    assert all(row["num_identical"] == row["num_compared"] == 4 for row in result["rows"])
    assert {"command", "commit", "versions", "device", "seed", "threads"} <= set(result["provenance"])


def test_parity_goes_on_where_it_stopped(pair: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "parity.json"
    common = ["parity", "--target", pair["target"], "--drafter", pair["drafter"], "--prompts", pair["prompts"]]
    common += ["--output", str(output), "--max_new_tokens", "8", "--decodings", "greedy", "temperature-1"]
    cli.main(common)
    records = output.with_suffix(".jsonl")
    lines = records.read_text(encoding="utf-8").splitlines(keepends=True)
    records.write_text("".join(lines[:3]), encoding="utf-8")

    status = cli.main(common)

    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert status == 0
    assert records.read_text(encoding="utf-8").splitlines(keepends=True) == lines
    assert [(row["identical"], row["bug"]) for row in rows] == [(2, 0), (2, 0)]


def test_report_renders_the_results_into_a_document(pair: dict[str, str], tmp_path: Path) -> None:
    results, document = tmp_path / "results", tmp_path / "README.md"
    options = ["--prompts", pair["prompts"], "--output", str(results / "speed.json"), "--max_new_tokens", "8"]
    cli.main(["bench", "--target", pair["target"], "--drafters", pair["drafter"], *options])
    document.write_text("<!-- results:begin -->\n<!-- results:end -->\n", encoding="utf-8")

    status = cli.main(["report", "--results", str(results), "--documents", str(document)])

    assert status == 0
    assert "### Speed against the target alone" in document.read_text(encoding="utf-8")


def test_two_drafters_of_one_name_are_refused(
    pair: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", pair["prompts"], "--output", str(tmp_path / "x.json")]

    status = cli.main(["bench", "--target", pair["target"], "--drafters", pair["drafter"], pair["drafter"], *options])

    assert status == 1
    assert "Two drafters are called `drafter`" in capsys.readouterr().err
