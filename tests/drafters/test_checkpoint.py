"""Loading a drafter from files that are cut short, not what they should be, or not finite: refused in words, nothing run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import FalconSpecDrafter
from transformers_falcon_spec.drafters.checkpoint import write_whole
from transformers_falcon_spec.drafters.config_fields import update_config
from transformers_falcon_spec.errors import CheckpointError

WEIGHTS, CONFIG, OPTIONS = "model.safetensors", "config.json", "generation_config.json"


class Evil:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_drafter(make_target(), block_size=2).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def cut(name: str, share: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(share * len(data))])

    return change


def with_field(name: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        (folder / CONFIG).write_text(json.dumps({**config, name: value}), encoding="utf-8")

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut(WEIGHTS, 0.9), "must hold files that can be read, but they cannot: .*not fully covered"),
        (cut(WEIGHTS, 0.001), "must hold files that can be read"),
        (cut(WEIGHTS, 0), "must hold files that can be read, but they cannot: .*header too small"),
        (cut(CONFIG, 0.5), "but they cannot: .*not a valid JSON file"),
        (cut(OPTIONS, 0.5), "but they cannot: .*not a valid JSON file"),
        (lambda folder: (folder / WEIGHTS).unlink(), "but they cannot: .*no file named model.safetensors"),
        (
            lambda folder: (folder / CONFIG).unlink(),
            "must have a `config.json` that says what it holds, but it has none",
        ),
        (with_field("block_size", "two"), "but they cannot: .*'block_size' expected int, got str"),
    ],
)
def test_files_that_cannot_be_read_are_refused(folder: Path, change: Callable[[Path], None], message: str) -> None:
    change(folder)

    with pytest.raises(CheckpointError, match=message):
        FalconSpecDrafter.from_pretrained(folder)


def test_who_may_read_the_config_may_read_the_weights(folder: Path, tmp_path: Path) -> None:
    drafter = FalconSpecDrafter.from_pretrained(folder)
    drafter.save_pretrained(tmp_path / "shards", max_shard_size="20KB")

    weights = [*folder.glob("*.safetensors"), *(tmp_path / "shards").glob("*.safetensors")]

    assert len(weights) > 2
    assert {file.stat().st_mode for file in weights} == {(folder / CONFIG).stat().st_mode}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, value: float) -> None:
    weights = load_file(folder / WEIGHTS)
    name = min(weights)
    weights[name].view(-1)[3] = value
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=f"must hold finite weights, but 1 hold NaN or infinity, .* `{name}`"):
        FalconSpecDrafter.from_pretrained(folder)


def test_a_pickle_that_would_run_code_is_refused_and_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"fc.weight": Evil(tmp_path / "run")}, folder / "pytorch_model.bin")

    with pytest.raises(
        CheckpointError, match=r"must hold files that can be read.* that would run code, is never read"
    ):
        FalconSpecDrafter.from_pretrained(folder)

    assert not (tmp_path / "run").exists()


def test_what_is_nowhere_keeps_the_words_of_the_hub() -> None:
    with pytest.raises(OSError, match="nowhere"):
        FalconSpecDrafter.from_pretrained("/nowhere/at/all")


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_drafter(make_target()).save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text(encoding="utf-8")
    names = {path.name for path in tmp_path.iterdir()}

    def write_half(path: Path, text: str, **options: Any) -> None:
        with path.open("w", **options) as file:
            file.write(text[: len(text) // 2])

        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="No space left"):
        update_config(tmp_path, draft_tree=None)

    assert (tmp_path / "config.json").read_text(encoding="utf-8") == before
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_file_that_is_written_anew_keeps_its_mode_and_the_link_to_it(tmp_path: Path) -> None:
    (tmp_path / "large_disk").mkdir()
    file, link = tmp_path / "large_disk" / "file.json", tmp_path / "file.json"
    file.write_text("old", encoding="utf-8")
    file.chmod(0o600)
    link.symlink_to(file)

    write_whole(link, "new")

    assert link.is_symlink()
    assert file.read_text(encoding="utf-8") == "new"
    assert file.stat().st_mode & 0o777 == 0o600
