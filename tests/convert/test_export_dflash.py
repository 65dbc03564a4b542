"""DFlash drafters in the form that vLLM and SGLang read: the weights as published, and the same drafter on the way back."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen3Config

from tests.tiny import make_target
from transformers_falcon_spec import DFlashDrafter
from transformers_falcon_spec.convert import convert_checkpoint, export_drafter
from transformers_falcon_spec.convert.export import NOT_HELD
from transformers_falcon_spec.drafters.config_fields import own_fields
from transformers_falcon_spec.errors import OptionError

from . import foreign, foreign_dflash, reference_dflash
from .drafting import converted
from .exports import exported
from .test_published_dflash import ALL_SLIDING, LLAMA3

FORMS: dict[str, tuple[foreign_dflash.Parts, tuple[str, ...]]] = {  # with the engines that hold it
    "plain": (foreign_dflash.dflash(), ("vllm", "sglang")),
    "llama 3.1": (
        foreign_dflash.dflash(rope_scaling={**LLAMA3, "original_max_position_embeddings": 16}),
        ("vllm", "sglang"),
    ),
    "a window": (foreign_dflash.dflash(**foreign_dflash.SLIDING), ("vllm", "sglang")),
    "a window that sees later tokens": (foreign_dflash.dflash(**ALL_SLIDING, is_causal=False), ("vllm",)),
    "no later tokens": (foreign_dflash.dflash(is_causal=True), ("vllm",)),
}
HELD = [(name, engine) for name, (_parts, engines) in FORMS.items() for engine in engines]


def drafter_of(parts: foreign_dflash.Parts, folder: Path) -> DFlashDrafter:
    """The drafter of a published checkpoint."""
    return converted(DFlashDrafter, foreign.written(folder / "source", *parts))


def assert_same(back: DFlashDrafter, drafter: DFlashDrafter) -> None:
    """The same weights bit for bit, and the same fields as far as an engine has a place for them."""
    weights = drafter.state_dict()
    assert back.state_dict().keys() == weights.keys()
    for name, weight in back.state_dict().items():
        assert weight.dtype == weights[name].dtype, name
        assert torch.equal(weight, weights[name]), name
    for name in own_fields(type(drafter.config)) - NOT_HELD:
        assert getattr(back.config, name) == getattr(drafter.config, name), name
    if "sliding_attention" in (drafter.config.layer_types or ()):
        assert back.config.sliding_window == drafter.config.sliding_window


@pytest.mark.parametrize(("name", "engine"), HELD)
@torch.no_grad()
def test_what_is_written_is_the_published_form_and_leads_back(name: str, engine: str, tmp_path: Path) -> None:
    source, weights = FORMS[name][0]
    drafter = drafter_of((source, weights), tmp_path)

    config, tensors = exported(drafter, tmp_path / "dest", engine)

    assert tensors.keys() == weights.keys()
    assert all(tensors[key].equal(weights[key]) for key in weights)
    assert not re.search("auto_map|falcon|_spec", json.dumps(config))
    assert type(AutoConfig.from_pretrained(tmp_path / "dest")) is Qwen3Config
    convert_checkpoint(tmp_path / "dest", tmp_path / "back")
    assert_same(DFlashDrafter.from_pretrained(tmp_path / "back", dtype="auto"), drafter)

    embeds, features = torch.randn(foreign_dflash.BLOCK, foreign.HIDDEN), torch.randn(20, 2 * foreign.HIDDEN)
    found, expected = (
        reference_dflash.states(tensors, {**each, **each["dflash_config"]}, embeds, features)
        for each in (config, source)
    )
    torch.testing.assert_close(found, expected)


def test_a_drafter_that_was_made_here_leads_back(tmp_path: Path) -> None:
    target = make_target("llama", num_hidden_layers=foreign_dflash.TARGET_LAYERS)
    drafter = DFlashDrafter.from_target(target, num_hidden_layers=2, block_size=4).bfloat16().eval()
    drafter.save_pretrained(tmp_path / "drafter")

    config, _weights = exported(tmp_path / "drafter", tmp_path / "dest", "sglang")

    assert config["dflash_config"]["target_layer_ids"] == drafter.config.target_layer_ids
    assert config["torch_dtype"] == "bfloat16"
    convert_checkpoint(tmp_path / "dest", tmp_path / "back")
    assert_same(DFlashDrafter.from_pretrained(tmp_path / "back", dtype="auto"), drafter)


SCALED = {"output_multiplier": 2.0, "final_logit_softcapping": 5.0}


@pytest.mark.parametrize(
    ("engine", "parts", "message"),
    [
        ("speculators", FORMS["plain"][0], "'speculators' cannot hold .* no form for DFlash. Try 'vllm' or 'sglang'"),
        ("vllm", foreign_dflash.dflash2(is_causal=False), "has no form for DFlash2. None of the others can"),
        ("vllm", foreign_dflash.dspark_speculators(), "has no form for DSpark"),
        ("vllm", foreign_dflash.dflash(SCALED), "no `output_multiplier`, `final_logit_softcapping`"),
        ("sglang", foreign_dflash.dflash({"input_embedding_scale": 0.5}), "computes no `input_embedding_scale`"),
        ("sglang", FORMS["no later tokens"][0], "sees later ones in full layers, and in no others. Try 'vllm'"),
        (
            "vllm",
            foreign_dflash.speculators(sample_from_anchor=True, block_size=4),
            r"none: \{'sample_from_anchor': True\}",
        ),
    ],
)
def test_what_an_engine_does_not_compute_is_refused(
    engine: Any, parts: foreign_dflash.Parts, message: str, tmp_path: Path
) -> None:
    drafter = drafter_of(parts, tmp_path)

    with pytest.raises(OptionError, match=message):
        export_drafter(drafter, tmp_path / "dest", engine)

    assert not (tmp_path / "dest").exists()


def test_a_short_list_of_tokens_has_no_place(tmp_path: Path) -> None:
    drafter = drafter_of(FORMS["plain"][0], tmp_path)
    drafter.set_draft_vocabulary(range(40))

    with pytest.raises(OptionError, match=r"must convert back\. `draft_vocab_size` must be 97"):
        export_drafter(drafter, tmp_path / "dest", "vllm")
