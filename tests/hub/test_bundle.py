"""The published code as files: complete, flat, and importing only what it requires."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from tests.hub.clients import run_client
from tests.tiny import make_target
from transformers_falcon_spec import (
    CheckpointError,
    DFlashDrafter,
    DiffusionDrafter,
    EagleDrafter,
    FalconSpecDrafter,
    LayerParallelDrafter,
    LookaheadDrafter,
    MedusaDrafter,
)
from transformers_falcon_spec.drafters.autoregressive import make_draft_model
from transformers_falcon_spec.drafters.diffuspec.search import NgramProxy
from transformers_falcon_spec.drafters.registry import drafter_classes
from transformers_falcon_spec.hub.bundle import FOLDER, add_code, copied_code, flattened, loader_of

KINDS = [
    *(DFlashDrafter, DiffusionDrafter, EagleDrafter, FalconSpecDrafter),
    *(LayerParallelDrafter, LookaheadDrafter, MedusaDrafter),
]
NEEDED = {"huggingface_hub", "safetensors", "torch", "transformers", "typing_extensions"}


def drafter_of(kind: type, target: LlamaForCausalLM) -> Any:
    """A fresh drafter of a class, with the files that it has besides weights."""
    if kind is LayerParallelDrafter:
        return LayerParallelDrafter.wrap(make_draft_model(target), target, group_size=2)
    drafter = kind.from_target(target)
    if kind is DiffusionDrafter:
        drafter.proxy = NgramProxy.fit([[5, 6, 7, 5, 6, 7]], 2, target.config.vocab_size)
    return drafter


def code_in(folder: Path, kind: type) -> Path:
    """Where the copied code of a class of drafters is written."""
    (folder / "config.json").write_text("{}", encoding="utf-8")
    add_code(kind, folder, with_code=True)
    return folder / FOLDER


def test_every_kind_of_drafter_is_tried() -> None:
    assert set(KINDS) == set(drafter_classes().values())


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_follows_the_imports_to_every_module(kind: type, tmp_path: Path) -> None:
    code = code_in(tmp_path, kind)
    followed = {Path(name) for name in get_relative_import_files(code / "generate.py")}
    written = set(code.glob("*.py"))

    assert followed | {code / "generate.py"} == written


@pytest.mark.parametrize("kind", KINDS)
def test_published_code_imports_what_it_requires_and_the_standard_library(kind: type, tmp_path: Path) -> None:
    code = code_in(tmp_path, kind)
    imported = {name for path in code.glob("*.py") for name in get_imports(path)}
    required = {
        re.split(r"[<>=]", line)[0].replace("-", "_") for line in (code / "requirements.txt").read_text().splitlines()
    }

    assert required == NEEDED
    assert {name for name in imported if name not in sys.stdlib_module_names} <= NEEDED


def test_lines_other_than_imports_stay_as_they_are() -> None:
    source = Path(__file__).parents[2] / "src/transformers_falcon_spec/generation/target.py"

    original, flat = source.read_text().splitlines(), flattened("generation.target").splitlines()[1:]
    changed = [(before, after) for before, after in zip(original, flat, strict=True) if before != after]

    assert len(original) == len(flat)
    assert ("from . import cache as cache_file", "from . import generation_cache as cache_file") in changed
    assert all(after.startswith("from .") for _, after in changed)


def test_a_class_of_other_software_has_no_code_to_publish() -> None:
    with pytest.raises(CheckpointError, match=r"comes from `transformers.models.llama"):
        copied_code(LlamaForCausalLM)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_is_short_and_takes_the_classes_from_the_package(kind: type, tmp_path: Path) -> None:
    drafter_of(kind, make_target()).save_pretrained(tmp_path)

    add_code(kind, tmp_path, with_code=False)

    written = [path.name for path in (tmp_path / "custom_generate").iterdir()]
    names: dict[str, Any] = {"__file__": "generate.py"}
    exec(loader_of(kind), names)  # noqa: S102  as Transformers does
    assert written == ["generate.py"]
    assert len(loader_of(kind).splitlines()) <= 25
    for auto, name in json.loads((tmp_path / "config.json").read_text())["auto_map"].items():
        module, _, found = name.partition(".")
        assert module == "custom_generate/generate"
        assert names[found] is (kind if auto == "AutoModel" else kind.config_class)


@pytest.fixture(scope="module")
def without_package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without this package finds: with the code of each kind, and with a loader alone."""
    folder = tmp_path_factory.mktemp("published")
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, vocab_size=64
    )
    target = LlamaForCausalLM(config).eval()
    target.save_pretrained(folder / "target")
    for kind in KINDS:
        drafter = drafter_of(kind, target)
        drafter.save_pretrained(folder / kind.__name__)
        add_code(kind, folder / kind.__name__, with_code=True)
    FalconSpecDrafter.from_target(target).save_pretrained(folder / "loader")
    add_code(FalconSpecDrafter, folder / "loader", with_code=False)

    return run_client(_SCRIPT.format(folder=folder, kinds=[kind.__name__ for kind in KINDS]), folder / "home")


def test_where_the_package_is_not_a_loader_says_how_to_install_it(without_package: dict[str, Any]) -> None:
    errors = without_package["errors"]

    assert len(errors) == 2
    for error in errors:
        assert "needs `transformers_falcon_spec` " in error
        assert "Install it: `pip install .` in a copy of its repository." in error


def test_where_the_package_is_installed_a_loader_loads_decodes_and_is_not_copied(tmp_path: Path) -> None:
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    FalconSpecDrafter.from_target(target).save_pretrained(tmp_path / "drafter")
    add_code(FalconSpecDrafter, tmp_path / "drafter", with_code=False)
    script = tmp_path / "script.py"
    script.write_text(_INSTALLED.format(folder=tmp_path))

    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=600)

    assert done.returncode == 0, done.stderr[-3000:]
    assert [path.name for path in (tmp_path / "again").iterdir() if path.is_dir() or path.suffix == ".py"] == []


def test_each_kind_loads_and_decodes_with_its_published_code_alone(without_package: dict[str, Any]) -> None:
    for kind in KINDS:
        found = without_package[kind.__name__]
        assert found["is_the_same"], kind
        assert found["num_drafted"] > 0
        assert found["refusal"].startswith("This `custom_generate` takes its drafter from the Hub")
    assert without_package["DiffusionDrafter"]["has_proxy"]


_INSTALLED = """
import torch
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{folder}/target").eval()
drafter = AutoModel.from_pretrained("{folder}/drafter", trust_remote_code=True).eval()
assert type(drafter).__module__.startswith("transformers_falcon_spec."), type(drafter)
inputs = dict(input_ids=torch.tensor([[5, 6, 7, 5, 6, 7]]), max_new_tokens=8, pad_token_id=0)
custom = dict(custom_generate="{folder}/drafter", trust_remote_code=True, assistant_model=drafter)
out = target.generate(**inputs, **custom, return_dict_in_generate=True)
assert out.sequences.equal(target.generate(**inputs))
assert out.speculation.num_drafted > 0
drafter.save_pretrained("{folder}/again")
"""
_SCRIPT = """
import json
import torch
from transformers import AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained("{folder}/target").eval()
inputs = dict(input_ids=torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]]), attention_mask=torch.ones(1, 8, dtype=torch.long))
options = dict(max_new_tokens=12, pad_token_id=0, return_dict_in_generate=True)
results = {{}}
for kind in {kinds}:
    folder = f"{folder}/{{kind}}"
    drafter = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    plain = target.generate(**inputs, **options)
    custom = dict(custom_generate=folder, trust_remote_code=True)
    out = target.generate(**inputs, **options, **custom, assistant_model=drafter)
    try:
        target.generate(**inputs, **custom)
    except ValueError as error:
        refusal = str(error)
    results[kind] = dict(
        is_the_same=out.sequences.tolist() == plain.sequences.tolist(),
        num_drafted=out.speculation.num_drafted,
        has_proxy=getattr(drafter, "proxy", None) is not None,
        refusal=refusal,
    )
results["errors"] = []
for use in (
    lambda: AutoModel.from_pretrained("{folder}/loader", trust_remote_code=True),
    lambda: target.generate(torch.tensor([[5, 6]]), custom_generate="{folder}/loader", trust_remote_code=True),
):
    try:
        use()
    except ImportError as error:
        results["errors"].append(str(error))
print(json.dumps(results))
"""
