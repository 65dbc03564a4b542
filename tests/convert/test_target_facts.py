"""Configs and targets that do not fit or do not say enough: each is refused in words, and nothing is written."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import VOCAB_SIZE
from tests.tiny import make_target
from transformers_falcon_spec import EagleDrafter, FalconSpecDrafter, MedusaDrafter
from transformers_falcon_spec.errors import CheckpointError, DrafterMismatchError, OptionError

from . import foreign
from .refusals import MAKERS, refused


@pytest.mark.parametrize(
    ("maker", "changes", "message"),
    [
        ("falcon", {"k_mask": 0}, "`k_mask` of the config .* must be a positive whole number, but it is 0"),
        ("falcon", {"k_mask": "2"}, "`k_mask` of the config .* must be a positive whole number, but it is '2'"),
        ("falcon", {"bias": "no"}, "`bias` of the config .* must be true or false, but it is 'no'"),
        (
            "eagle",
            {"hidden_size": None},
            "`hidden_size` of the config .* must be a positive whole number, but it is None",
        ),
        (
            "eagle",
            {"num_attention_heads": 7},
            r"hidden size \(64\) is not a multiple of the number of attention heads \(7\)",
        ),
        (
            "eagle",
            {"num_hidden_layers": 2},
            "`num_hidden_layers` must be 1 to be converted, but .* says 2: an Eagle drafter has one decoder layer",
        ),
        ("eagle", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "Rotary positions must be of a kind in"),
        ("eagle", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5}, "in different ways"),
        ("eagle3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "Rotary positions must be of a kind in"),
        ("falcon", {"rope_scaling": "yarn"}, "must be described by an object and .* says 'yarn' with 10000.0"),
        ("eagle", {"rope_theta": "1e6"}, "a `rope_theta` above 0, but .* says {} with '1e6'"),
        ("eagle3", {"rope_parameters": {"rope_theta": -1}}, "with -1. Fetch"),
        ("falcon", {"rms_norm_eps": "small"}, "reading it fails: Strict.*'rms_norm_eps' expected float, got str"),
        ("eagle", {"hidden_act": "swish2"}, "reading it fails: KeyError: 'swish2'"),
        ("eagle3", {"rope_scaling": {"rope_type": "llama3"}}, "reading it fails: KeyError: .*Missing required keys"),
        (
            "speculators",
            {"speculators_config": "none"},
            "`speculators_config` of the config .* must be an object, but it is 'none'",
        ),
        ("dflash", {"architectures": True}, "reading it fails: TypeError: "),
        (
            "eagle3",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "those of all layers alike, but .*1000000",
        ),
        ("eagle3", {"partial_rotary_factor": 0.5}, r"must turn whole heads.*`partial_rotary_factor` 0\.5"),
        ("eagle", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "must turn whole heads"),
        (
            "eagle",
            {"vocab_size": "97"},
            "`vocab_size` of the config .* must be a positive whole number, but it is '97'",
        ),
        ("medusa v2", {"vocab_size": -5}, "must be a positive whole number, but it is -5"),
        ("eagle", {"vocab_size": 1000}, "embed_tokens.weight.*instead of"),
        ("eagle", {"vocab_size": None}, "how large the vocabulary is.*--target NAME"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None}, "which ones the drafter reads.*--target NAME"),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [1, 2]},
            r"must list 3 different hidden states.*it is \[1, 2\]",
        ),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, r"must list 3 different hidden states"),
        (
            "eagle3",
            {"target_hidden_size": 32},
            "`target_hidden_size` must be 64 .* says 32: embeddings of a width of their own",
        ),
        ("speculators", {"embed_requires_grad": True}, r"missing: \['embed_tokens.weight'\]"),
        (
            "speculators",
            {"transformer_layer_config": {"model_type": "qwen3"}},
            "`model_type` must be 'llama' to be converted, but .* 'qwen3'",
        ),
        ("speculators", {"transformer_layer_config": None}, "it is None"),
        (
            "medusa",
            {"medusa_num_layers": 2},
            "`medusa_num_layers` must be 1 .* says 2: so many blocks are in each head",
        ),
        ("medusa v2", {"vocab_size": None}, "how large the vocabulary is.*--target NAME"),
    ],
)
def test_a_config_that_is_wrong_or_silent_is_refused(
    maker: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, weights = MAKERS[maker]()
    if maker == "eagle" and "vocab_size" in changes:
        weights["embed_tokens.weight"] = torch.zeros(VOCAB_SIZE, foreign.HIDDEN)

    refused(foreign.written(tmp_path / "source", {**config, **changes}, weights), message)


def test_a_config_without_sizes_is_refused(tmp_path: Path) -> None:
    config, weights = foreign.falcon()

    refused(
        foreign.written(tmp_path / "source", {"k_mask": config["k_mask"]}, weights),
        "`hidden_size` of the config .* but it is None",
    )


@pytest.mark.parametrize("kind", ["out of range", "twice", "no whole numbers", "another t2d", "missing"])
def test_a_draft_vocabulary_that_cannot_be_is_refused(kind: str, tmp_path: Path) -> None:
    config, weights = MAKERS["eagle3"]()
    if kind == "out of range":
        weights["d2t"][-1] = VOCAB_SIZE
    elif kind == "twice":
        weights["d2t"][1] = weights["d2t"][0] - 1
    elif kind == "no whole numbers":
        weights["d2t"] = weights["d2t"].float()
    elif kind == "another t2d":
        weights["t2d"] = ~weights["t2d"]
    else:
        del weights["d2t"]

    messages = {
        "missing": r"missing: \['d2t'\]",
        "no whole numbers": r"'d2t': '\(40,\) instead of \(40,\) of torch.int64'",
    }
    message = messages.get(kind, "`d2t` must lead to different tokens")
    refused(foreign.written(tmp_path / "source", config, weights), message)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("falcon", {"hidden_size": 32}, "expects features of size 64, but the target .* gives 32"),
        ("eagle", {"vocab_size": 50}, "expects a vocabulary of size 97, but the target .* gives 50"),
        ("eagle3", {"hidden_size": 32}, "expects features of size 64"),
        ("speculators", {"vocab_size": 50}, "expects a vocabulary of size 97"),
        ("medusa", {"vocab_size": 50}, "expects a vocabulary of size 97"),
        ("medusa v2", {"hidden_size": 32}, "expects features of size 64"),
    ],
)
def test_a_target_of_other_sizes_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_target("llama", **changes).save_pretrained(tmp_path / "target")

    source = foreign.written(tmp_path / "source", *MAKERS[name]())

    refused(source, message, str(tmp_path / "target"), DrafterMismatchError)


def test_a_target_that_is_none_is_refused(tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", *foreign.eagle())

    refused(source, "`--target` must name a folder or Hub id", str(tmp_path / "nothing"), OptionError)


def test_published_layers_need_a_target_deep_enough(tmp_path: Path) -> None:
    make_target("llama").save_pretrained(tmp_path / "target")
    source = foreign.written(tmp_path / "source", *foreign.eagle3())

    refused(source, "at least 7 layers, and .* has 3", str(tmp_path / "target"))


def test_layers_that_the_target_does_not_have_are_refused(tmp_path: Path) -> None:
    make_target("llama").save_pretrained(tmp_path / "target")
    source = foreign.written(tmp_path / "source", *foreign.eagle3(eagle_aux_hidden_state_layer_ids=[0, 1, 3]))

    refused(
        source, r"must lie in 0..2, the inputs of the target's layers, but .* \[0, 1, 3\]", str(tmp_path / "target")
    )


@pytest.mark.parametrize(
    ("drafter_class", "maker"), [(FalconSpecDrafter, "falcon"), (EagleDrafter, "eagle"), (MedusaDrafter, "medusa")]
)
def test_loading_what_was_not_converted_names_the_command(drafter_class: Any, maker: str, tmp_path: Path) -> None:
    source = foreign.written(tmp_path / "source", *MAKERS[maker]())
    words = (
        rf"must be one of .*, but it is .*must be converted first: `falcon-spec convert {re.escape(str(source))} DEST`"
    )

    with pytest.raises(CheckpointError, match=words):
        drafter_class.from_pretrained(source)
