"""Files that commands write hold no path of this machine, whatever the current folder and however paths are given."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.chat import save_target
from tests.convert import foreign
from tests.drafters.diffuspec.stand_ins import make_diffusion
from tests.tiny import make_drafter
from transformers_falcon_spec import cli

PROMPTS = ("one plus two", "three", "four minus one", "two times two")
COMMANDS = {
    "bench": "--target {target} --methods {drafter} --decodings greedy",
    "parity": "--target {target} --drafter {drafter}",
    "trees": "--target {target} --drafter {drafter} --nodes 4",
    "calibrate": "--target {target} --drafter {drafter}",
}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of models and prompts, and a current folder far from it."""
    base = tmp_path / "project" / "models"
    target = AutoModelForCausalLM.from_pretrained(save_target(base / "target"))
    make_drafter(target, block_size=1).save_pretrained(base / "drafter")
    lines = [json.dumps({"id": words, "prompt": words}) for words in PROMPTS]
    (base / "sums.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "elsewhere" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere" / "here")
    return base


def run(monkeypatch: pytest.MonkeyPatch, command: str, base: Path) -> int:
    """A command, with its arguments where records take them from."""
    filled = command.format(base=base, target=base / "target", drafter=base / "drafter")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/falcon-spec", *filled.split()])
    return cli.main(filled.split())


def held(base: Path, *files: Path) -> dict[str, str]:
    """By name the files that hold the folder in which everything of the test lies."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    assert texts
    return {name: text for name, text in texts.items() if str(base.parents[1]) in text}


@pytest.mark.parametrize("name", COMMANDS)
def test_results_hold_no_path_of_this_machine(name: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = f" --prompts {base}/sums.jsonl --output {base.parent}/out/result.json --max_new_tokens 24"
    (base.parent / "out").mkdir()

    status = run(monkeypatch, f"{name} {COMMANDS[name]}{common}", base)

    assert status == 0
    assert held(base, *(base.parent / "out").iterdir(), *base.glob("*.html")) == {}
    result = (base.parent / "out" / "result.json").read_text(encoding="utf-8")
    assert "/out/result.json" in json.loads(result)["provenance"]["command"]
    assert "/models/drafter" in result


def test_a_converted_drafter_holds_no_path_of_this_machine(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign.written(base / "source", *foreign.falcon())

    assert run(monkeypatch, "convert {base}/source {base}/new --target {target}", base) == 0

    assert held(base, *(base / "new").glob("*.json")) == {}


def test_a_drafter_around_a_model_from_a_folder_holds_no_path_of_this_machine(base: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(base / "target")
    drafter = make_diffusion(target)
    drafter.config.draft_config._name_or_path = str(base / "target")

    drafter.save_pretrained(base / "new")

    assert held(base, *(base / "new").glob("*.json")) == {}
