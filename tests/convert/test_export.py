"""What an export writes: a folder that another engine reads alone, and that converts back to the same drafter."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from tests.every_drafter import every_drafter
from tests.families import VOCAB_SIZE
from tests.tiny import make_target
from transformers_falcon_spec.convert import export_drafter
from transformers_falcon_spec.convert.export import NOT_HELD
from transformers_falcon_spec.drafters.config_fields import own_fields
from transformers_falcon_spec.errors import CheckpointError, OptionError

from . import foreign, reference_eagle
from .exports import FIRST, VARIANTS, converted_back, eagle, exported

LENGTH = 24
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FORMS: dict[str, dict[str, dict[str, Any]]] = {  # variants of version 3 that each format holds
    "speculators": VARIANTS,
    "vllm": VARIANTS,
    "sglang": {name: VARIANTS[name] for name in ("plain", "own vocabulary", "3.1", "llama 3.1")},
}
THIRD = [(form, options) for form, variants in FORMS.items() for options in variants.values()]
EVERY = [(form, {"version": 3, **options}) for form, options in THIRD]
EVERY += [(form, {"version": 1, **FIRST[name]}) for form, name in (("vllm", "plain"), ("vllm", "qkv bias"))]
EVERY += [("sglang", {"version": 1, **FIRST["fc bias"]})]


def refused(drafter: Any, dest: Path, form: Any, message: str) -> None:
    """The export must be refused with these words, and leave nothing behind."""
    with pytest.raises(OptionError, match=message):
        export_drafter(drafter, dest, form)

    assert not list(dest.parent.iterdir())


@pytest.mark.parametrize(("form", "options"), EVERY)
def test_converted_back_it_is_the_same_drafter_bit_for_bit(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    drafter = eagle(**options)

    export_drafter(drafter, tmp_path / "dest", form)  # type: ignore[arg-type]

    assert len({file.stat().st_mode for file in (tmp_path / "dest").iterdir()}) == 1
    back, weights = converted_back(tmp_path / "dest"), drafter.state_dict()
    assert back.state_dict().keys() == weights.keys()
    for name, weight in back.state_dict().items():
        assert weight.dtype == weights[name].dtype, name
        assert torch.equal(weight, weights[name]), name
    fields = own_fields(drafter.config_class) - NOT_HELD | {"target_name_or_path"}
    for name in fields:
        found, expected = getattr(back.config, name), getattr(drafter.config, name)
        assert (list(found) == list(expected)) if name == "feature_layers" else (found == expected), name
    assert back.config.num_draftable_tokens == drafter.config.num_draftable_tokens


@pytest.mark.parametrize(("form", "options"), [(form, options) for form, options in THIRD if form != "speculators"])
@torch.no_grad()
def test_what_is_written_computes_the_same_in_the_published_forward_of_eagle3(
    form: str, options: dict[str, Any], tmp_path: Path
) -> None:
    drafter = eagle(**options)
    embeds, features = torch.randn(LENGTH, 64), torch.randn(LENGTH, 3 * 64)

    config, weights = exported(drafter, tmp_path / "dest", form)

    states = reference_eagle.fused(weights, config, features)
    states = reference_eagle.third_forward(weights, config, "midlayer", embeds, states)
    output = drafter(embeds[None], features[None])
    torch.testing.assert_close(states, output.states[0, 0], atol=1e-5, rtol=1e-5)
    logits = reference_eagle.third_logits(weights, config, states)
    torch.testing.assert_close(logits, output.logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("form", "name"), [("vllm", "plain"), ("vllm", "qkv bias"), ("sglang", "fc bias")])
@torch.no_grad()
def test_what_is_written_computes_the_same_in_the_published_forward_of_eagle1(
    form: str, name: str, tmp_path: Path
) -> None:
    drafter = eagle(version=1, **FIRST[name])
    embeds, features = torch.randn(2, LENGTH, 64)

    config, weights = exported(drafter, tmp_path / "dest", form)

    expected = drafter(embeds[None], features[None]).states[0, 0]
    found = reference_eagle.first_forward(weights, config, embeds, features)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_sglang_gets_zeros_for_the_bias_that_its_eagle1_always_has(tmp_path: Path) -> None:
    drafter = eagle(version=1, fc_bias=False)

    _config, weights = exported(drafter, tmp_path / "dest", "sglang")

    assert torch.equal(weights["fc.bias"], torch.zeros(64))
    inputs = torch.randn(2, 1, LENGTH, 64)
    assert torch.equal(converted_back(tmp_path / "dest")(*inputs).states, drafter(*inputs).states)


@pytest.mark.parametrize(
    ("form", "place", "ids"),
    [("speculators", None, [2, 4, 6]), ("vllm", None, [2, 4, 6]), ("sglang", "eagle_config", [1, 3, 5])],
)
def test_the_layers_are_counted_as_the_engine_counts_them(
    form: str, place: str | None, ids: list[int], tmp_path: Path
) -> None:
    config, _weights = exported(eagle(), tmp_path / "dest", form)

    assert (config if place is None else config[place])[LAYER_IDS] == ids
    assert (LAYER_IDS in config) == (place is None)


@pytest.mark.parametrize(("form", "options"), EVERY)
def test_the_folder_needs_no_code_of_ours(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    drafter = eagle(**options)

    config, weights = exported(drafter, tmp_path / "dest", form)

    assert sorted(path.name for path in (tmp_path / "dest").iterdir()) == ["config.json", "model.safetensors"]
    assert not re.search("auto_map|falcon|eagle_spec", json.dumps(config))
    assert {str(value.dtype) for name, value in weights.items() if name not in ("d2t", "t2d")} == {"torch.float32"}
    if form != "speculators":
        read = AutoConfig.from_pretrained(tmp_path / "dest")
        assert type(read) is LlamaConfig
        assert read.rope_parameters == drafter.config.rope_parameters
        assert (read.hidden_size, read.head_dim, read.vocab_size) == (64, drafter.config.head_dim, VOCAB_SIZE)
        assert read.dtype == torch.float32


def test_a_saved_drafter_is_exported_in_the_type_of_its_file(tmp_path: Path) -> None:
    drafter = eagle(draft_vocab_size=foreign.DRAFT_VOCAB).bfloat16()
    drafter.save_pretrained(tmp_path / "drafter")

    config, weights = exported(tmp_path / "drafter", tmp_path / "dest", "vllm")

    assert config["torch_dtype"] == "bfloat16"
    assert torch.equal(weights["midlayer.self_attn.q_proj.weight"], drafter.layer.self_attn.q_proj.weight)
    assert (weights["d2t"].dtype, weights["t2d"].dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_a_window_that_is_left_out_is_said(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config, _weights = exported(eagle(sliding_window=100), tmp_path / "dest", form)

    assert "The window of 100 tokens is left out" in caplog.text
    assert ("--speculative-draft-window-size 100" in caplog.text) == (form == "sglang")
    assert "sliding_window" not in config


def test_trees_and_temperatures_are_left_out_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = {"parents": [-1, 0, 0], "ranks": [-1, 0, 1]}
    temperatures = {"greedy": [1.5], "sampled": [1.2]}

    config, _weights = exported(
        eagle(draft_tree=tree, confidence_temperatures=temperatures), tmp_path / "dest", "vllm"
    )

    assert not {"draft_tree", "confidence_temperatures"} & set(config)
    assert not caplog.text


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        (
            "speculators",
            {"version": 1},
            "'speculators' cannot hold .*it has no form for Eagle-1.* Try 'sglang', serve",
        ),
        ("vllm", {"version": 1}, "it computes no `fc_bias`. Try 'sglang', serve"),
        ("sglang", {"version": 1, "qkv_bias": True}, "it computes no `qkv_bias`"),
        ("sglang", {"attention_bias": True, "norm_before_fc": True}, "no `attention_bias`, `norm_before_fc`"),
        ("sglang", {"norm_before_residual": True}, "`norm_before_residual`. Try 'speculators' or 'vllm', serve"),
        (
            "vllm",
            {"feature_layers": [2, 4]},
            r"that read 3 hidden states as wide as themselves, 64, .* reads \[2, 4\]",
        ),
        (
            "vllm",
            {"feature_layers": [4, 2, 6]},
            r"the lower ones first .* reads \[4, 2, 6\].* None of the others can. S",
        ),
        ("vllm", {"feature_layers": [2, 2, 6]}, r"reads \[2, 2, 6\], which are 192 wide"),
        ("vllm", {"feature_layers": [2, 4, -1]}, r"none below 0, but this one reads \[2, 4, -1\]"),
        ("sglang", {"feature_layers": [0, 2, 4]}, r"none below 1, but this one reads \[0, 2, 4\]"),
        ("vllm", {"feature_size": 96}, "are 96 wide together"),
        ("vllm", {"fc_norm": True, "norm_before_fc": True}, "one of `fc_norm` and `norm_before_fc`, but not both"),
        ("vllm", {"mlp_bias": True}, r"no place for \['layer.mlp.down_proj.bias'"),
        ("vllm", {"fc_bias": True}, r"no place for \['fc.bias'\]"),
        ("vllm", {"version": 1, "fc_bias": False, "head_dim": 24}, r"none: \{'head_dim': 24\}"),
        ("vllm", {"embedding_size": 32}, r"none: \{'embedding_size': 32\}"),
        (
            "vllm",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}},
            "must convert back. Rotary positions must be of a kind",
        ),
    ],
)
def test_what_a_format_cannot_hold_is_refused(
    form: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    refused(eagle(**options), tmp_path / "dest", form, message)


@pytest.mark.parametrize("name", [None, "absolute"])
def test_speculators_gets_the_name_of_a_target_that_others_can_load(name: str | None, tmp_path: Path) -> None:
    path = name and str(tmp_path.parent / "elsewhere" / "target")
    (tmp_path.parent / "elsewhere").mkdir(exist_ok=True)

    refused(
        eagle(target_name_or_path=path), tmp_path / "dest", "speculators", "must name the target, whose embeddings"
    )


def test_an_adapter_must_be_merged_first(tmp_path: Path) -> None:
    drafter = eagle()
    drafter.layer.mlp.down_proj.register_parameter("lora_A", torch.nn.Parameter(torch.zeros(1)))

    refused(
        drafter,
        tmp_path / "dest",
        "vllm",
        r"no place for \['layer.mlp.down_proj.lora_A'\] \(an adapter must be merged",
    )


@pytest.mark.parametrize("kind", ["falcon", "medusa", "diffusion", "layers in parallel", "lookahead"])
def test_drafters_of_other_kinds_are_refused_with_what_to_do(kind: str, tmp_path: Path) -> None:
    drafter = every_drafter(kind, make_target("llama"))
    message = f"Only an `EagleDrafter` or a `DFlashDrafter` can be exported, but this is a `{type(drafter).__name__}`"

    refused(drafter, tmp_path / "dest", "vllm", message)


def test_a_saved_drafter_of_another_kind_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    every_drafter("falcon", make_target("llama")).save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / "model.safetensors").unlink()

    with pytest.raises(OptionError, match="this is a `FalconSpecDrafter`"):
        export_drafter(tmp_path / "drafter", tmp_path / "dest", "vllm")


def test_a_checkpoint_of_other_software_must_be_converted_first(tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", *foreign.eagle3())

    with pytest.raises(CheckpointError, match="must be converted first"):
        export_drafter(source, tmp_path / "dest", "vllm")


def test_an_unknown_format_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    refused(eagle(), tmp_path / "dest", "tensorrt", r"\('speculators', 'vllm', 'sglang'\), but it is 'tensorrt'")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "mine").write_text("mine")

    with pytest.raises(OptionError, match="`DEST` must be a new or an empty folder"):
        export_drafter(eagle(), tmp_path / "dest", "vllm")

    assert [path.name for path in (tmp_path / "dest").iterdir()] == ["mine"]


def test_a_local_path_of_the_target_is_not_written(tmp_path: Path) -> None:
    make_target("llama").save_pretrained(tmp_path / "target")
    drafter = eagle(target_name_or_path=str(tmp_path / "target"))

    config, _weights = exported(drafter, tmp_path / "dest", "vllm")

    assert str(tmp_path) not in json.dumps(config)
