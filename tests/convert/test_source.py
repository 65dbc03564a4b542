"""Files that are damaged, dangerous or missing: each is refused in words, and nothing is written."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transformers_falcon_spec import EagleDrafter
from transformers_falcon_spec.convert import convert_checkpoint
from transformers_falcon_spec.convert import source as source_module
from transformers_falcon_spec.errors import CheckpointError, OptionError

from . import foreign
from .refusals import MAKERS, NEEDED, refused


class Bomb:
    """A pickle of this runs a command."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("name", MAKERS)
def test_a_weight_under_another_name_is_both_missing_and_left_over(name: str, tmp_path: Path) -> None:
    config, weights = MAKERS[name]()
    key = NEEDED[name]
    weights[f"{key}s"] = weights.pop(key)

    source = foreign.written(tmp_path / "source", config, weights)

    refused(source, rf"missing: \['{re.escape(key)}'\]; unexpected: \['{re.escape(key)}s'\]")


@pytest.mark.parametrize("name", MAKERS)
def test_a_weight_too_many_is_refused(name: str, tmp_path: Path) -> None:
    config, weights = MAKERS[name]()

    source = foreign.written(tmp_path / "source", config, {**weights, "surplus.weight": torch.zeros(2)})

    refused(source, r"there are unexpected: \['surplus.weight'\]")


@pytest.mark.parametrize("name", MAKERS)
def test_a_weight_of_another_shape_is_refused(name: str, tmp_path: Path) -> None:
    config, weights = MAKERS[name]()
    weights[NEEDED[name]] = weights[NEEDED[name]][:-1]

    source = foreign.written(tmp_path / "source", config, weights)

    refused(source, rf"\{{'{re.escape(NEEDED[name])}': '.* instead of .*'\}}")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_weights_that_are_not_finite_are_refused(bad: float, file: str, tmp_path: Path) -> None:
    config, weights = foreign.eagle()
    weights["fc.weight"][3, 5] = bad

    refused(foreign.written(tmp_path / "source", config, weights, file), "`fc.weight` holds NaN or infinity")


def test_whole_numbers_in_place_of_weights_are_refused(tmp_path: Path) -> None:
    config, weights = foreign.eagle()
    weights["fc.bias"] = torch.ones(foreign.HIDDEN, dtype=torch.int64)

    refused(
        foreign.written(tmp_path / "source", config, weights),
        r"'fc.bias': '\(64,\) of torch.int64 instead of \(64,\)'",
    )


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config, weights = foreign.eagle()
    weights["fc.weight"] = weights["fc.weight"].to(torch.int8)

    source = foreign.written(tmp_path / "source", config, weights)

    refused(source, "plain floating point numbers, but `fc.weight` is of torch.int8")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.98])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_a_file_cut_short_is_refused(file: str, share: float, tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", *foreign.eagle(), file)
    content = (source / file).read_bytes()
    (source / file).write_bytes(content[: int(len(content) * share)])

    refused(source, f"{re.escape(file)}` must be a (whole file|pickle of plain tensors).*(again|safetensors)")


def test_a_pickle_of_the_oldest_kind_cut_short_is_refused(tmp_path: Path) -> None:
    config, weights = foreign.eagle()
    source = foreign.written(tmp_path / "source", config, weights)
    path = source / "pytorch_model.bin"
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    assert convert_checkpoint(source, tmp_path / "whole").name == "Eagle-1/2"
    path.write_bytes(path.read_bytes()[:-500])

    refused(source, "cut short or damaged")


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(
    is_zip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, weights = foreign.eagle()
    source = foreign.written(tmp_path / "source", config, {})
    torch.save({**weights, "bomb": Bomb()}, source / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)

    refused(source, "a pickle that would run code, of which nothing was run")

    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content",
    [
        [torch.zeros(2)],
        {"model": {"fc.weight": torch.zeros(2)}},
        {"step": 3, "fc.weight": torch.zeros(2)},
    ],
)
def test_a_pickle_of_anything_but_named_tensors_is_refused(content: Any, tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", foreign.eagle()[0], {})
    torch.save(content, source / "pytorch_model.bin")

    refused(source, "must hold tensors by name, but it holds something else")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must hold a `config.json`, which says what the weights are"),
        ("{", "must hold JSON, but it does not"),
        ("[]", "must hold a JSON object, but it holds a list"),
    ],
)
def test_a_config_that_is_not_there_or_not_one_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", None, foreign.eagle()[1])
    if text is not None:
        (source / "config.json").write_text(text)

    refused(source, message)


def test_a_folder_without_weights_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", foreign.eagle()[0], {}, "optimizer.pt")

    refused(source, r"but it holds \['config.json', 'optimizer.pt'\]")


def test_an_index_must_name_files_beside_it(tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", foreign.eagle()[0], {}, "other.bin")
    index = source / "model.safetensors.index.json"

    for weight_map, message in [
        ({"fc.weight": "model-00001-of-00001.safetensors"}, "are not there. Fetch the whole"),
        ({"fc.weight": "../other.safetensors"}, "lie elsewhere"),
        ({}, "must name the file of every weight"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(source, message)


@pytest.mark.parametrize("name", ["no-such-folder", "a/b/c/d", "someone/not-in-the-cache"])
def test_a_source_that_is_nowhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="`SOURCE` must be a folder or a Hub id"):
        convert_checkpoint(name, tmp_path / "dest")


def test_a_source_that_is_a_file_is_refused(tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", *foreign.eagle())

    refused(source / "pytorch_model.bin", "is a file. Give its folder")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_there_is_never_overwritten(kind: str, tmp_path: Path) -> None:
    source, dest = foreign.written(tmp_path / "source", *foreign.eagle()), tmp_path / "dest"
    kept = dest if kind == "file" else dest / "notes.txt"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")

    refused(source, "`DEST` must be a new or an empty folder", error=OptionError)

    assert kept.read_text() == "mine"


def test_a_crash_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = foreign.written(tmp_path / "source", *foreign.eagle())

    def crash(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EagleDrafter, "save_pretrained", crash)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "dest")

    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_from_the_hub_nothing_but_config_tokenizer_and_weights_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = foreign.written(tmp_path / "snapshot", *foreign.eagle())
    requested: list[list[str]] = []

    def fetch(name: str, allow_patterns: list[str], revision: str | None) -> str:
        assert (name, revision) == ("someone/eagle", None)
        requested.append(allow_patterns)
        return str(source)

    monkeypatch.setattr(source_module, "snapshot_download", fetch)
    convert_checkpoint("someone/eagle", tmp_path / "dest")
    (source / "config.json").write_text(json.dumps({"hydra_num_heads": 4}))

    with pytest.raises(CheckpointError, match="This is Hydra"):  # seen before any weights are fetched
        convert_checkpoint("someone/eagle", tmp_path / "other")
    assert [len(patterns) for patterns in requested] == [9, 15, 9]
    assert not any(pattern.endswith((".py", "*")) for patterns in requested for pattern in patterns)


def test_of_a_whole_model_with_heads_no_weights_are_read(tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", foreign.medusa()[0], {}, "unused.pt")
    names = ["model.embed_tokens.weight", "medusa_head.0.0.linear.weight"]
    weight_map = dict.fromkeys(names, "model-00001-of-00009.safetensors")  # a file that is not even there
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    refused(source, r"This is Medusa-2 \(.*trained together with the heads")
