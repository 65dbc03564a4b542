"""`generate` and `parity` through the command line, on a tiny pair saved to disk."""

import json
import os
import re
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.chat import save_target
from tests.tiny import make_drafter
from transformers_falcon_spec import cli

pytestmark = pytest.mark.unit


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
    pair: dict[str, str], temperature: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    options = ["--prompts", pair["prompts"], "--compare", "--max_new_tokens", "8", "--temperature", temperature]

    status = cli.main(["generate", "--target", pair["target"], "--drafter", pair["drafter"], *options])

    out = capsys.readouterr().out
    assert status == 0
    last = out.strip().split("\n")[-1]
    assert last.startswith("The texts are identical on all 2 prompts; with the drafter")
    assert re.search(r"times as fast \([\d.]+ to [\d.]+ by prompt\)\.$", last)
    assert all(word in out for word in ("acceptance length", "verify", "tokens a second"))


def test_signs_that_a_pipe_does_not_know_are_replaced(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="ascii", write_through=True))
    options = ["--prompt", "one plus two \N{EM DASH}", "--compare", "--max_new_tokens", "8"]

    status = cli.main(["generate", "--target", pair["target"], "--drafter", pair["drafter"], *options])

    assert status == 0
    assert "one plus two ?" in written.getvalue().decode("ascii")


def test_generate_without_a_prompt_says_what_to_give(pair: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["generate", "--target", pair["target"], "--drafter", pair["drafter"]])

    assert status == 1
    assert "give `--prompt TEXT` or `--prompts FILE`" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_new_tokens", "0"], "`max_new_tokens` must be at least 1, but it is 0."),
        (["--temperature", "-1"], "`temperature` must be at least 0, but it is -1.0."),
        (["--top_p", "0"], "`top_p` must lie above 0 and up to 1, but it is 0.0."),
        (["--seed", str(2**64)], f"`seed` must lie in {-(2**63)}..{2**64 - 1}, but it is {2**64}."),
        (["--prompt", "Gr\udcfc\udcdfe"], "a text must be of whole characters"),  # Latin-1, as Python reads it
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_loaded(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = cli.main(["generate", "--target", "nothing", "--drafter", "nothing", "--prompt", "Hi", *options])

    assert status == 1
    assert message in capsys.readouterr().err
