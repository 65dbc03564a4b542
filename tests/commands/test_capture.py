"""`--capture` of the commands that write texts: it reaches the drafter, is refused where it cannot be, and is kept with results."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.chat import save_target
from tests.tiny import make_drafter
from transformers_falcon_spec import cli
from transformers_falcon_spec.generation.capture.acceptor import DeviceAcceptor

pytestmark = pytest.mark.commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_target(folder / "target")
    drafter = make_drafter(AutoModelForCausalLM.from_pretrained(target), block_size=2)
    drafter.save_pretrained(folder / "drafter")
    (folder / "sums.jsonl").write_text('{"id": "a", "prompt": "one plus two"}\n', encoding="utf-8")
    return folder


@pytest.fixture
def device_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes of each draft that was accepted in captured steps."""
    steps: list[int] = []
    accept = DeviceAcceptor.accept

    def counted(self: Any, draft: Any, *rest: Any) -> Any:
        steps.append(draft.token_ids.shape[1])
        return accept(self, draft, *rest)

    monkeypatch.setattr(DeviceAcceptor, "accept", counted)
    return steps


def _generate(folder: Path, _output: Path, *options: str) -> int:
    pair = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return cli.main(["generate", *pair, *_texts(folder), *options])


def _parity(folder: Path, output: Path, *options: str) -> int:
    pair = ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]
    return cli.main(["parity", *pair, *_texts(folder), "--output", str(output), *options])


def _bench(folder: Path, output: Path, *options: str) -> int:
    models = ["--target", str(folder / "target"), "--methods", str(folder / "drafter")]
    files = ["--output", str(output), "--decodings", "greedy"]
    return cli.main(["bench", *models, *_texts(folder), *files, *options])


def _texts(folder: Path) -> list[str]:
    return ["--prompts", str(folder / "sums.jsonl"), "--max_new_tokens", "8"]


Command = Callable[..., int]
COMMANDS: list[Command] = [_generate, _parity, _bench]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__.strip("_"))
def test_texts_are_decoded_as_the_option_says(
    command: Command, folder: Path, tmp_path: Path, device_steps: list[int]
) -> None:
    assert command(folder, tmp_path / "uncaptured.json", "--capture", "no") == 0
    assert not device_steps
    assert command(folder, tmp_path / "captured.json", "--capture", "yes") == 0
    assert max(device_steps) > 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (_parity, "must hold measurements under the same settings"),
        (_bench, "were made with other weights or settings"),
    ],
)
def test_captured_and_uncaptured_results_are_not_mixed(
    command: Command, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(folder, tmp_path / "results.json", "--capture", "yes") == 0

    assert command(folder, tmp_path / "results.json", "--capture", "no") == 1

    assert message in capsys.readouterr().err
    result = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert result["provenance"]["capture"] == "yes"


def test_a_target_that_cannot_be_captured_is_an_error_that_says_why(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_target(tmp_path / "target", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})

    assert _generate(tmp_path, tmp_path, "--capture", "yes") == 1

    shown = capsys.readouterr().err
    assert "`capture=True` needs a call" in shown
    assert "rotary frequencies depend on the length of the text" in shown


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__.strip("_"))
def test_other_words_are_refused(
    command: Command, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(folder, tmp_path / "results.json", "--capture", "static")

    assert "--capture" in capsys.readouterr().err
