"""Records of provenance hold paths that make sense on other machines, in every tracked file and in new ones."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from transformers_falcon_spec import provenance as module
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.provenance import portable, provenance
from transformers_falcon_spec.records import Records

ROOT = Path(__file__).parents[1]
MACHINE_PATHS = re.compile(
    r"(?<![\w./~-])(?:/(?:work|root|home|tmp|private|Users|mnt|media|scratch|workspace)/|[A-Za-z]:\\+Users)"
)
ALLOWED = {
    "tests/test_provenance.py": "made-up paths, and the names that are looked for",
    "lab/data/smollm2_answers.jsonl.xz": "answers of a model, which makes paths up",
}


def test_no_tracked_file_holds_a_path_of_the_machine_that_made_it() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("This is no checkout: the tracked files are not known.")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        if name in ALLOWED or Path(name).suffix == ".safetensors" or not (ROOT / name).is_file():
            continue
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), start=1):
            found += [
                f"{name}:{number}: {line[match.start() : match.start() + 80]}"
                for match in MACHINE_PATHS.finditer(line)
            ]

    assert not found


@pytest.mark.parametrize("text", ['"/work/main/x"', "a=/home/me/x", "see `/tmp/x/y`", "C:\\Users\\me", "['/root/x']"])
def test_paths_of_a_machine_are_recognised(text: str) -> None:
    assert MACHINE_PATHS.search(text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a project, which is the current folder, and others beside it."""
    for name in ("near/project/models", "near/here", "far/away/models", "my home/drafters"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "near" / "project")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("near/project/models/reference-target", "models/reference-target"),
        ("near/project", "."),
        ("near/project/runs/../runs/x.json", "runs/x.json"),
        ("near/data/x.jsonl", ".../data/x.jsonl"),
        ("far/away/models/llama", ".../models/llama"),
        ("my home/x.json", ".../my home/x.json"),
        ("my home/drafters/by me/falcon", ".../by me/falcon"),
    ],
)
def test_a_path_keeps_what_makes_sense_elsewhere(root: Path, path: str, expected: str) -> None:
    assert portable(root / path) == expected


@pytest.mark.parametrize(
    "value",
    [
        *(
            "own/llama",
            "models/reference-target",
            "prompt-lookup:3",
            "https://example.org/tmp/x",
            "and/or",
            "/",
            "a / b",
        ),
        *("../shared/data", "/no/such/folder/here", "2/3 of /s", "/" + 300 * "x", "/a\0", "", None, 3, 0.5, True),
    ],
)
def test_what_is_no_path_of_this_machine_stays(value: Any) -> None:
    assert portable(value) == value
    assert type(portable(value)) is type(value)


def test_paths_are_found_inside_of_texts_and_of_lists(root: Path) -> None:
    inside, outside = root / "near/project/a.jsonl", root / "far/away/models/b"

    assert portable(f"['{inside}', 'x/y']") == "['a.jsonl', 'x/y']"
    assert portable(f"name={outside}") == "name=.../models/b"
    assert portable(f"`{outside}` must be a folder: {inside}.") == "`.../models/b` must be a folder: a.jsonl."
    assert portable({"a": [inside, (str(outside), 1)]}) == {"a": ["a.jsonl", (".../models/b", 1)]}


def test_a_record_names_arguments_and_settings_portably(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, output = root / "near/project/models/t", root / "far/away/models/x.json"
    monkeypatch.setattr(
        sys, "argv", ["/usr/bin/falcon-spec", "bench", f"--targets=t={target}", "--output", str(output)]
    )

    record = provenance(targets={"t": str(target)}, output=output, device="cpu")

    assert record["command"] == "falcon-spec bench --targets=t=models/t --output .../models/x.json"
    assert (record["targets"], record["output"]) == ({"t": "models/t"}, ".../models/x.json")
    assert str(root) not in json.dumps(record)


def test_measurements_go_on_from_settings_with_absolute_paths_and_with_portable_ones(root: Path) -> None:
    file, prompts = root / "near/here/x.jsonl", root / "near/project/p.jsonl"
    file.write_text(json.dumps({"settings": {"prompts": [str(prompts)]}}) + '\n{"a": 1}\n', encoding="utf-8")

    assert Records(file, {"prompts": [str(prompts)]}).entries == [{"a": 1}]
    assert Records(file, {"prompts": ["p.jsonl"]}).entries == [{"a": 1}]
    with pytest.raises(OptionError, match="same settings"):
        Records(file, {"prompts": ["q.jsonl"]})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "CPU, "),
        ({"device": "cpu"}, "CPU, "),
        ({"device": torch.device("cpu")}, "CPU, "),
        ({"device": "auto"}, "GPU None"),
        ({"device": "cuda:1"}, "GPU cuda:1"),
    ],
)
def test_a_machine_with_a_gpu_is_named_by_what_computed(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")

    device = provenance(**settings)["device"]
    assert device.startswith(expected)
    assert ("GPU" in device) or torch.backends.cpu.get_cpu_capability() in device  # trees cost more without AVX-512


def test_a_processor_is_named_with_the_instructions_that_decide_its_fast_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = {"model name": "Some CPU", "flags": "fpu amx_bf16 avx2 avx512_vnni"}
    monkeypatch.setattr(module, "_cpu_field", lambda name: told[name])

    assert module.processor_flags() == ["avx2", "amx_bf16"]
    assert "(Some CPU, " in provenance()["device"]
    assert provenance()["device"].endswith(", avx2, amx_bf16)")


def test_a_processor_that_lists_no_instructions_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Path", lambda _: Path("/no/such/file"))

    assert module.processor_flags() == []
