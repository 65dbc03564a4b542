"""Published DFlash drafters whose maths, files or target do not fit: each is refused in words, and nothing is written."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import make_target
from transformers_falcon_spec import DFlashDrafter
from transformers_falcon_spec.errors import DrafterMismatchError, OptionError

from . import foreign_dflash as foreign
from .drafting import converted
from .foreign import written
from .refusals import refused

JETSPEC = {"mask_token_id": foreign.MASK, "target_layer_ids": foreign.READ, "causal_head": True}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "laguna"}, r"`model_type` must be 'qwen3' to be converted, .* says 'laguna'"),
        ({"attention_bias": True}, r"`attention_bias` must be False .* says True"),
        ({"is_neox_style": False}, r"`is_neox_style` must be True .* says False"),
        ({"sample_from_anchor": True}, r"`sample_from_anchor` must be False .* says True"),
        ({"logit_scale": 0.5}, r"`logit_scale` must be 1 .* says 0.5"),
        ({"target_hidden_size": 32}, r"`target_hidden_size` must be 64 .* says 32"),
        ({"draft_vocab_size": 40}, r"`draft_vocab_size` must be 97 .* says 40"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "Rotary positions must be of a kind in"),
        ({"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.5}}, "must turn whole heads"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, "must turn whole heads"),
        ({"hidden_size": "64"}, "reading it fails: .*'hidden_size' expected int, got str"),
        (
            {"num_attention_heads": 0},
            "`num_attention_heads` of the config .* must be a positive whole number, but it is 0",
        ),
        ({"num_key_value_heads": 3}, "must have the shapes that its config says"),
        ({"layer_types": ["full_attention"]}, "reading it fails: .* must be equal to the number of"),
        ({"layer_types": ["chunked_attention"] * 2}, "`layer_types` must be of"),
        ({"layer_types": ["sliding_attention"] * 2}, "need `use_sliding_window` and a `sliding_window` of at least 1"),
        ({"dflash_config": JETSPEC, **foreign.SLIDING}, "its own code computes no windows"),
        ({"is_causal": "no"}, "`is_causal` of the config .* must be true or false, but it is 'no'"),
        ({"block_size": None}, "`block_size` of the config .* must be a whole number, but it is None"),
        ({"dflash_config": None, "architectures": ["DFlashDraftModel"]}, "there it has None"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_config_that_asks_for_more_or_says_too_little_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, weights = foreign.dflash()

    refused(written(tmp_path / "source", {**config, **fields}, weights), message)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"target_layer_ids": None}, "`target_layer_ids` must list .* at least 0, but in .* it is None"),
        ({"target_layer_ids": []}, r"it is \[\]"),
        ({"target_layer_ids": [-1, 2]}, r"it is \[-1, 2\]"),
        ({"mask_token_id": None}, "`mask_token_id` of the config .* must be a whole number, but it is None"),
        ({"output_multiplier": -1.0}, "`output_multiplier` of the config .* must be a number above 0, but it is -1.0"),
        ({"attention_mode": "mla"}, "says `attention_mode` 'mla', which may change what the drafter computes"),
        ({"use_swa": True}, "says `use_swa` True, which may"),
        ({"attention_sink_bias": True}, "says `attention_sink_bias` True, which may"),
        ({"selector_rank": 4}, r"`selector_rank` must be None .* says 4: DFlash2 has it"),
        ({**foreign.SECOND}, "`conv_kernel_size` must be None .* says 3: DFlash2 has it"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_dflash_config_that_asks_for_more_or_says_too_little_is_refused(
    inner: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, weights = foreign.dflash()
    config["dflash_config"] = {**config["dflash_config"], **inner}

    refused(written(tmp_path / "source", config, weights), message)


def test_a_bound_of_zero_is_none(tmp_path: Path) -> None:
    source = written(tmp_path / "source", *foreign.dflash({"final_logit_softcapping": 0.0}))

    assert converted(DFlashDrafter, source).config.final_logit_softcapping is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fields": {"sample_from_anchor": 1}},
            "`sample_from_anchor` of the config .* must be true or false, but it is 1",
        ),
        ({"fields": {"shift_label": True}}, r"`shift_label` must be False .* says True"),
        ({"fields": {"draft_vocab_size": 40}}, r"`draft_vocab_size` must be 97 .* says 40"),
        ({"fields": {"aux_hidden_state_layer_ids": [0, 2]}}, r"at least 1, but in .* it is \[0, 2\]"),
        ({"fields": {"mask_token_id": None}}, "`mask_token_id` of the config .* but it is None"),
        (
            {"fields": {"transformer_layer_config": None}},
            "`transformer_layer_config` of the config .* must be an object, but it is None",
        ),
        ({"layers": {"model_type": "llama"}}, r"`model_type` must be 'qwen3' .* says 'llama'"),
        ({"layers": {"attention_bias": True}}, r"`attention_bias` must be False .* says True"),
    ],
    ids=str,
)
def test_what_speculators_may_ask_for_besides_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, weights = foreign.speculators()
    config["transformer_layer_config"] |= changes.get("layers", {})

    refused(written(tmp_path / "source", {**config, **changes.get("fields", {})}, weights), message)


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        ("dflash", {"intermediate_size": 97}, r"'layers.0.mlp.down_proj.weight': '\(64, 96\) instead of \(64, 97\)'"),
        ("dflash", {"num_hidden_layers": 1, "layer_types": None}, r"unexpected: \['layers.1.input_layernorm.weight'"),
        ("dflash", {"num_hidden_layers": 3, "layer_types": None}, r"missing: \['layers.2.input_layernorm.weight'"),
        ("dflash", {"head_dim": 16}, r"'layers.0.self_attn.k_norm.weight': '\(24,\) instead of \(16,\)'"),
        (
            "dspark_speculators",
            {"markov_rank": 9},
            r"'markov_head.markov_w1.weight': '\(97, 8\) instead of \(97, 9\)'",
        ),
        ("dspark_speculators", {"markov_rank": 0}, r"unexpected: \['markov_head.markov_w1.weight'"),
        ("dspark_speculators", {"markov_rank": None}, "`markov_rank` of the config .* must be a whole number"),
        ("dspark_speculators", {"markov_head_type": "gated"}, r"missing: \['markov_head.gate_proj.bias'"),
        (
            "dflash2",
            {"vocab_size": 98},
            r"'candidate_selector.predecessor_codebook': '\(97, 8\) instead of \(98, 8\)'",
        ),
    ],
)
def test_weights_that_do_not_belong_to_the_config_are_named(
    form: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, weights = getattr(foreign, form)()

    refused(written(tmp_path / "source", {**config, **fields}, weights), message)


def test_weights_for_more_layers_than_the_config_reads_are_named(tmp_path: Path) -> None:
    config, weights = foreign.dflash()
    config["dflash_config"]["target_layer_ids"] = [0, 1, 2]

    refused(written(tmp_path / "source", config, weights), r"'fc.weight': '\(64, 128\) instead of \(64, 192\)'")


def test_a_mask_with_an_embedding_of_its_own_is_refused(tmp_path: Path) -> None:
    config, weights = foreign.dflash()
    weights["mask_embedding"] = torch.zeros(foreign.HIDDEN)

    refused(
        written(tmp_path / "source", config, weights),
        r"This is DFlash with a mask of its own \(there are weights called \['mask_embedding'\]\)",
    )


def test_scores_whose_state_runs_along_a_block_are_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "source", *foreign.dspark_speculators("rnn"))

    refused(source, r"`markov_head_type` must be one of \('vanilla', 'gated'\), but it is 'rnn'", error=OptionError)


def test_copies_of_other_shapes_than_the_targets_are_refused(tmp_path: Path) -> None:
    target = make_target("llama", num_hidden_layers=foreign.TARGET_LAYERS)
    target.save_pretrained(tmp_path / "target")
    config, weights = foreign.speculators(copies_of=target)
    weights["lm_head.weight"] = weights["lm_head.weight"][:40]
    source = written(tmp_path / "source", config, weights)

    refused(source, "`lm_head.weight` of .* differs from the target's", str(tmp_path / "target"))


@pytest.mark.parametrize(
    ("target", "parts", "error", "message"),
    [
        ({"vocab_size": 98}, {}, DrafterMismatchError, "expects a vocabulary of size 97, but the target .* gives 98"),
        ({"hidden_size": 32}, {}, DrafterMismatchError, "expects features of size 64"),
        (
            {"num_hidden_layers": 3},
            {"num_target_layers": None},
            DrafterMismatchError,
            r"layers \[0, 2\], so they must lie in 0..1, but one is above that",
        ),
        (
            {},
            {"inner": {"mask_token_id": 97}},
            OptionError,
            "`mask_token_id` must lie in 0..96, the target's vocabulary, but it is 97",
        ),
    ],
    ids=["vocabulary", "widths", "layers", "mask"],
)
def test_a_target_that_it_was_not_made_for_is_refused(
    target: dict[str, Any], parts: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    make_target("llama", **{"num_hidden_layers": 4, **target}).save_pretrained(tmp_path / "target")
    source = written(tmp_path / "source", *foreign.dflash(**parts))

    refused(source, message, str(tmp_path / "target"), error)


def test_the_depth_that_the_config_states_bounds_its_layers_where_no_target_is_given(tmp_path: Path) -> None:
    source = written(tmp_path / "source", *foreign.dflash(num_target_layers=3))

    refused(source, r"must lie in 0..1, but one is above that", error=DrafterMismatchError)


def test_a_target_whose_embeddings_are_scaled_is_refused(tmp_path: Path) -> None:
    make_target("gemma3", num_hidden_layers=3, hidden_size=64, vocab_size=97).save_pretrained(tmp_path / "target")
    source = written(tmp_path / "source", *foreign.dflash())

    refused(source, "multiplies them by 8 first", str(tmp_path / "target"), DrafterMismatchError)
