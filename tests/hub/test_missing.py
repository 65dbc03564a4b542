"""What is not there is told in one sentence, after one request at most and before anything is loaded."""

from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http

from tests.hub.conftest import point_to
from tests.hub.repositories import Hub
from tests.tiny import make_target
from transformers_falcon_spec import load_drafter
from transformers_falcon_spec.cli import main
from transformers_falcon_spec.commands.loading import check_device
from transformers_falcon_spec.convert.conversion import check_there
from transformers_falcon_spec.errors import CheckpointError, OptionError

COMMANDS = {
    "generate": ["generate", "--drafter", "someone/nothing", "--prompt", "one"],
    "train": ["train", "--data", "data.jsonl", "--show_masks", "1"],
    "regenerate": ["regenerate", "--data", "data.jsonl", "--output", "answers.jsonl", "--device", "cpu"],
}


def requests_for_models(hub: Hub) -> list[str]:
    """The client also asks, once in a process, which agents there are."""
    return [line for line in hub.requests if not line.endswith("/api/agent-harnesses")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_target_that_the_hub_lacks_is_told_after_one_request(
    command: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = '{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}'
    Path("data.jsonl").write_text(f"{row}\n", encoding="utf-8")

    assert main([*COMMANDS[command], "--target", "models/my-target"]) == 1

    error = capsys.readouterr().err
    assert "CheckpointError: `models/my-target` must be a folder with a target, or the name of one on the Hub" in error
    assert requests_for_models(hub) == ["GET /api/models/models/my-target"]


def test_a_drafter_that_the_hub_lacks_is_told_after_one_request(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="`someone/nothing` must be a folder with a drafter, or the name of one"):
        load_drafter("someone/nothing", make_target())

    assert requests_for_models(hub) == ["GET /api/models/someone/nothing"]


@pytest.mark.usefixtures("hub")
def test_without_a_connection_nothing_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(_http.time, "sleep", pauses.append)
    point_to("http://127.0.0.1:9", monkeypatch)

    with pytest.raises(CheckpointError, match=r"the Hub gives nothing for that name: .*[^.]\. Check the name, the"):
        load_drafter("someone/nothing", make_target())

    assert pauses == []


def test_what_lies_in_a_folder_or_in_the_cache_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    Path(constants.HF_HUB_CACHE, "models--someone--known").mkdir(parents=True)

    for name in ("someone/known", str(tmp_path)):
        check_there(name, "target")

    assert requests_for_models(hub) == []


@pytest.mark.parametrize(("name", "is_asked"), [("gpt2", True), ("./gpt2", False), ("/gpt2", False), ("a/b/c", False)])
def test_only_what_can_be_a_name_is_asked_for(name: str, is_asked: bool, hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"`.*gpt2|a/b/c`"):
        check_there(name, "target")

    assert bool(requests_for_models(hub)) == is_asked


@pytest.mark.parametrize(("device", "num_devices"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_gpu_that_is_not_there_is_refused(device: str, num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_devices > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_devices)

    with pytest.raises(OptionError, match=f"it is '{device}', and PyTorch .* finds {num_devices} CUDA devices. Give"):
        check_device(device)


@pytest.mark.parametrize("device", ["gpu", "cpu:one", ""])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(OptionError, match=f"`device` must be cpu, cuda, cuda:N or auto, but it is '{device}'"):
        check_device(device)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "cpu", "auto"])
def test_other_devices_are_left_to_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    check_device(device)


def test_the_command_refuses_a_missing_gpu_before_it_looks_for_a_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    assert main([*COMMANDS["generate"], "--target", "/nowhere", "--device", "cuda"]) == 1

    assert capsys.readouterr().err.startswith("OptionError: `device` must be one that this machine has")
