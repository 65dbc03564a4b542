"""The published code as files: complete, flat, and importing only what it requires."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

from tests.hub.clients import run_client
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
from transformers_falcon_spec.hub.bundle import auto_map, flattened, write_custom_generate

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


def test_every_kind_of_drafter_is_tried() -> None:
    assert set(KINDS) == set(drafter_classes().values())


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_follows_the_imports_to_every_module(kind: type, tmp_path: Path) -> None:
    write_custom_generate(kind, tmp_path)

    code = tmp_path / "custom_generate"
    followed = {Path(name) for name in get_relative_import_files(code / "generate.py")}
    written = set(code.glob("*.py"))

    assert followed | {code / "generate.py"} == written


@pytest.mark.parametrize("kind", KINDS)
def test_published_code_imports_what_it_requires_and_the_standard_library(kind: type, tmp_path: Path) -> None:
    write_custom_generate(kind, tmp_path)

    code = tmp_path / "custom_generate"
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
        write_custom_generate(LlamaForCausalLM, Path())


def test_each_kind_loads_and_decodes_with_its_published_code_alone(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, vocab_size=64
    )
    target = LlamaForCausalLM(config).eval()
    target.save_pretrained(tmp_path / "target")
    for kind in KINDS:
        drafter = drafter_of(kind, target)
        drafter.config.auto_map = auto_map(kind)
        drafter.save_pretrained(tmp_path / kind.__name__)
        write_custom_generate(kind, tmp_path / kind.__name__)

    results = run_client(_SCRIPT.format(folder=tmp_path, kinds=[kind.__name__ for kind in KINDS]), tmp_path / "home")

    for kind in KINDS:
        assert results[kind.__name__]["is_the_same"], kind
        assert results[kind.__name__]["num_drafted"] > 0
        assert results[kind.__name__]["refusal"].startswith("This `custom_generate` takes its drafter from the Hub")
    assert results["DiffusionDrafter"]["has_proxy"]


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
print(json.dumps(results))
"""
