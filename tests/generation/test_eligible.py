"""Whether a target can be drafted for is known before work begins, and why not is said."""

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests import runs
from tests.doubles import RandomDrafter
from tests.families import BESIDE, FAMILIES
from tests.tiny import make_target, peaked
from transformers_falcon_spec import DFlashDrafter, EagleDrafter, FalconSpecDrafter, LookaheadDrafter, MedusaDrafter
from transformers_falcon_spec.drafters.base import DrafterModel
from transformers_falcon_spec.errors import GenerationError, TargetError
from transformers_falcon_spec.generation.probe import check_target

DRAFTERS = (FalconSpecDrafter, EagleDrafter, MedusaDrafter, DFlashDrafter, LookaheadDrafter)
STATEFUL = [
    name for name, family in FAMILIES.items() if family.form == "refused" and name != "recurrent_gemma"
]  # which a probe finds
REFUSAL = "rejected drafts cannot be taken back|takes its cache as `cache_params`"


@pytest.mark.parametrize("family", ["llama", "bloom", "lfm2", "qwen3_5"])
def test_a_target_that_reads_drafts_says_how(family: str) -> None:
    assert check_target(make_target(family)).form == FAMILIES[family].form


@pytest.mark.parametrize("family", STATEFUL)
def test_a_target_whose_state_cannot_be_taken_back_is_refused_before_any_forward(family: str) -> None:
    target = make_target(family)
    target.forward = None  # which nobody may call

    with pytest.raises(GenerationError, match=REFUSAL):
        check_target(target)


def test_a_target_that_cannot_be_probed_is_refused_in_words() -> None:
    target = make_target("llama")
    target.model.norm.register_forward_hook(lambda _module, _inputs, output: output.cumsum(1))  # not the token's own

    with pytest.raises(TargetError, match="cannot verify drafts"):
        check_target(target)


def test_a_target_without_weights_is_refused_in_words() -> None:
    with pytest.raises(GenerationError, match="on the `meta` device"):
        check_target(make_target("llama").to("meta"))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_no_drafter_is_made_for_such_a_target(kind: type[DrafterModel]) -> None:
    with pytest.raises(GenerationError, match=REFUSAL):
        kind.from_target(make_target("rwkv"))


OWN_CACHES = {
    "MiniMaxConfig": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "hidden_size": 32}
    | {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "XLNetConfig": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48},
}


@pytest.mark.parametrize("name", OWN_CACHES)
def test_a_target_without_a_cache_of_the_usual_kind_is_said_to_have_none(name: str) -> None:
    config = getattr(transformers, name)(vocab_size=97, **OWN_CACHES[name])
    target = peaked(AutoModelForCausalLM.from_config(config))
    runs.plain(target, max_new_tokens=2)  # it writes by itself

    message = rf"but this call has none: `{type(target).__name__}` keeps none, or one of its own kind"
    for drafter in (RandomDrafter(), LookaheadDrafter.from_target(target)):
        with pytest.raises(GenerationError, match=message):
            runs.drafted(target, drafter, max_new_tokens=2)


def test_a_target_whose_layers_keep_an_image_is_refused_in_words() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "attention_heads": 2}
    vision |= {"num_global_layers": 1, "image_size": 28, "patch_size": 14, "vision_output_dim": 64}
    fields: Any = {**BESIDE["mllama"].fields, "vision_config": {**vision, "intermediate_layers_indices": [0]}}
    target = peaked(AutoModelForImageTextToText.from_config(transformers.MllamaConfig(**fields)))
    image = {
        "pixel_values": torch.ones(1, 1, 4, 3, 28, 28),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]]),
        "cross_attention_mask": torch.ones(1, 12, 1, 4, dtype=torch.long),
    }
    runs.plain(target, max_new_tokens=2, **image)

    with pytest.raises(GenerationError, match=r"its layer 1 has \d+ slots after 12 tokens, as where layers attend to"):
        runs.drafted(target, RandomDrafter(), max_new_tokens=2, **image)


def test_a_target_that_reads_without_a_cache_is_refused_in_words() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    target = peaked(AutoModelForCausalLM.from_config(config))
    runs.plain(target, max_new_tokens=2)

    with pytest.raises(TargetError, match=r"`OpenAIGPTLMHeadModel` was given a cache, but gives none back\.$"):
        runs.drafted(target, RandomDrafter(), max_new_tokens=2)
