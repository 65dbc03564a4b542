"""`falcon-spec parity` as it is run: exit status, files, resume, and what it says."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.chat import save_target
from tests.tiny import make_drafter
from transformers_falcon_spec import cli
from transformers_falcon_spec.drafters.config_fields import update_config
from transformers_falcon_spec.evaluation.parity import ParityCheck
from transformers_falcon_spec.generation.acceptors import NodeScores

pytestmark = pytest.mark.benchmarks


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target")
    make_drafter(AutoModelForCausalLM.from_pretrained(target), block_size=2).save_pretrained(folder / "drafter")
    prompts = folder / "sums.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one plus two"}\n{"id": "b", "prompt": "three"}\n', encoding="utf-8")
    names = {"--target": target, "--drafter": folder / "drafter", "--prompts": prompts, "--max_new_tokens": 8}
    return ["parity", *(str(part) for pair in names.items() for part in pair)]


@pytest.fixture
def broken_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeScores, "token_after", lambda self, node: int(self.logits[node].topk(2).indices[1]))


def test_identical_texts_end_with_0_and_leave_a_report(arguments: list[str], tmp_path: Path) -> None:
    output = tmp_path / "parity.json"

    status = cli.main([*arguments, "--output", str(output)])

    report = json.loads(output.read_text(encoding="utf-8"))
    assert status == 0
    (row,) = report["rows"]
    assert row["identical"] == row["num_prompts"] == 2
    assert {"command", "commit", "versions", "device", "seed", "threads", "dtype"} <= set(report["provenance"])


@pytest.mark.usefixtures("broken_walk")
def test_a_bug_ends_with_1_and_is_named(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "parity.json"

    status = cli.main([*arguments, "--output", str(output)])

    shown = capsys.readouterr()
    report = json.loads(output.read_text(encoding="utf-8"))
    assert status == 1
    assert "ParityError: The text with the drafter must be the target's own, but 2 texts differ." in shown.err
    assert "The first bug: greedy, sums a, new token 0: " in shown.err
    assert "greedy: 0 identical (0.0%, 0.0% to 65.8%), 0 ties" in shown.out
    assert [row["bug"] for row in report["rows"]] == [2]


@pytest.mark.usefixtures("broken_walk")
def test_an_interrupted_check_keeps_what_it_found(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = [*arguments, "--output", str(tmp_path / "parity.json"), "--decodings", "greedy", "temperature-1"]
    run, checked = ParityCheck.run, []

    def interrupted(self: ParityCheck, prompt: Any, *others: Any) -> Any:
        if len(checked) == 3:
            raise KeyboardInterrupt
        checked.append(prompt.prompt_id)
        return run(self, prompt, *others)

    monkeypatch.setattr(ParityCheck, "run", interrupted)
    assert cli.main(common) == 130
    checked[:] = []

    status = cli.main(common)

    report = json.loads((tmp_path / "parity.json").read_text(encoding="utf-8"))
    assert checked == ["b"]
    assert status == 1
    assert [row["bug"] for row in report["rows"]] == [2, 2]
    assert all(found["difference"]["checks"] for row in report["rows"] for found in row["differences"])


def test_a_smaller_limit_reports_only_what_it_asks_for(arguments: list[str], tmp_path: Path) -> None:
    common = [*arguments, "--output", str(tmp_path / "parity.json")]
    cli.main(common)

    cli.main([*common, "--limit", "1"])

    assert json.loads((tmp_path / "parity.json").read_text(encoding="utf-8"))["rows"][0]["num_prompts"] == 1


def test_the_tuner_chooses_only_where_it_is_asked_to_and_such_results_are_not_mixed(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, tuned = ParityCheck.run, []

    def watched(self: ParityCheck, *others: Any) -> Any:
        tuned.append(self.drafter.generation_config.tune)
        return run(self, *others)

    monkeypatch.setattr(ParityCheck, "run", watched)
    common = [*arguments, "--limit", "1"]

    for name, options in {"every_step": [], "tuned": ["--tune"]}.items():
        assert cli.main([*common, "--output", str(tmp_path / f"{name}.json"), *options]) == 0
    assert tuned == [False, True]
    assert cli.main([*common, "--output", str(tmp_path / "tuned.json")]) == 1
    assert "must hold measurements under the same settings" in capsys.readouterr().err


def test_results_of_other_prompts_or_with_other_options_of_the_drafter_are_not_taken_for_these(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, checked = ParityCheck.run, []

    def watched(self: ParityCheck, prompt: Any, *others: Any) -> Any:
        checked.append(prompt.prompt_id)
        return run(self, prompt, *others)

    monkeypatch.setattr(ParityCheck, "run", watched)
    pair = Path(arguments[arguments.index("--target") + 1]).parent
    folder = shutil.copytree(pair, tmp_path / "pair")
    own = [each.replace(str(pair), str(folder)) for each in arguments]
    common = [*own, "--output", str(tmp_path / "parity.json")]
    prompts = folder / "sums.jsonl"
    assert cli.main(common) == 0

    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    rows[1] = {"id": rows[1]["id"], "prompt": "seven"}
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert cli.main(common) == 0
    assert checked == [*(str(row["id"]) for row in rows), str(rows[1]["id"])]

    update_config(folder / "drafter", sliding_window=8)
    assert cli.main(common) == 1
    assert "must hold measurements under the same settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "parity.jsonl"], "`output` must end in `.json`"),
        (["--output", "x.json", "--limit", "0"], "`limit` must be at least 1, but it is 0"),
        (["--output", "x.json", "--decodings", "hot"], "`decodings` must be some of"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_is_written(
    arguments: list[str],
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)

    assert cli.main([*arguments, *options]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_help_says_what_the_verdicts_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["parity", "--help"]) == 0

    text = " ".join(capsys.readouterr().out.split())
    assert "a bug otherwise. The exit status is 0 if no bug was found, else 1." in text
    assert "For each prompt and decoding the target writes a text alone and one with the drafter" in text
