"""Targets that take images, with text alone, whose decoder or head is not where others have it: the text stays the target's own."""

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText, PreTrainedModel

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.families import FAMILIES, VOCAB_SIZE
from tests.tiny import in_double, make_drafter, make_prompt, peaked
from transformers_falcon_spec import LookaheadDrafter
from transformers_falcon_spec.generation.head import apply_head
from transformers_falcon_spec.generation.model_parts import decoder_of
from transformers_falcon_spec.generation.probe import probe

pytestmark = pytest.mark.families

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **_VISION}
_LLAMA4 = _VISION | {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32}
_IDS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GLIMMER = {**FAMILIES["qwen3"].fields, "num_hidden_layers": 2, "sliding_window": 8}
_GLIMMER |= {"layer_types": ["sliding_attention", "full_attention"], "layer_rope_theta": [1e4, 0]}
_KOSMOS = {"embed_dim": 64, "layers": 2, "ffn_dim": 96, "attention_heads": 4, "max_position_embeddings": 256, **_IDS}

# the config, the text family or the fields of the text's config, other fields, and how it reads drafts
TARGETS: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "aya_vision": ("AyaVisionConfig", "cohere2", {"vision_config": _SIGLIP}, "tree"),
    "cohere2_vision": (
        "Cohere2VisionConfig",
        "cohere2",
        {"vision_config": _SIGLIP, "alignment_intermediate_size": 48},
        "tree",
    ),
    "llama4": ("Llama4Config", "llama4", {"vision_config": _LLAMA4 | {"image_size": 28, "patch_size": 14}}, "tree"),
    "muse_glimmer": (
        "MuseGlimmerConfig",
        _GLIMMER,
        {"vision_config": _VISION, "out_hidden_size": 32, "projector_hidden_size": 32},
        "tree",
    ),
    "paligemma": (
        "PaliGemmaConfig",
        "gemma",
        {"vision_config": _SIGLIP, "image_token_index": 96, "projection_dim": 64},
        "tree",
    ),
    "kosmos2_5": (
        "Kosmos2_5Config",
        _KOSMOS,
        {"vision_config": _VISION | {"patch_embed_hidden_size": 32, "head_dim": 16}, "latent_query_num": 4},
        "paths",
    ),
}


LLAMA4_FAILS = pytest.mark.skipif(
    transformers.__version__.startswith("5.24."),
    reason="of Transformers 5.24, Llama 4 with pictures writes no text by itself: its output has no `image_outputs`",
)
PARAMS = [pytest.param(name, marks=LLAMA4_FAILS if name == "llama4" else ()) for name in TARGETS]


@pytest.fixture(scope="module", params=PARAMS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(family: str) -> PreTrainedModel:
    name, text, fields, _ = TARGETS[family]
    if isinstance(text, str):
        text = getattr(transformers, FAMILIES[text].config)(**FAMILIES[text].fields).to_dict()
    config = getattr(transformers, name)(text_config=text, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return in_double(peaked(AutoModelForImageTextToText.from_config(config)))


def test_the_probe_says_how_it_reads_drafts(family: str, target: PreTrainedModel) -> None:
    capability = probe(target)

    assert (capability.form, capability.head_fault) == (TARGETS[family][3], "")


def test_the_head_gives_the_models_own_logits(target: PreTrainedModel) -> None:
    states: list[torch.Tensor] = []
    hook = decoder_of(target).register_forward_hook(lambda _module, _inputs, output: states.append(output[0]))
    with torch.no_grad():
        logits = target(input_ids=make_prompt().clamp(max=90)).logits
    hook.remove()

    torch.testing.assert_close(apply_head(target, states[0]), logits.float())


@pytest.mark.parametrize("mode", [{}, runs.SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", ["random", "falcon"])
def test_the_text_is_the_targets_own(target: PreTrainedModel, kind: str, mode: dict[str, Any]) -> None:
    prompt = make_prompt(14).clamp(max=90)
    gold = runs.plain(target, prompt, **mode).sequences
    drafter = RandomDrafter(12) if kind == "random" else make_drafter(target)

    pair = runs.both(target, InformedDrafter(drafter, gold), prompt, **mode)

    pair.assert_equal()
    assert pair.stats.num_accepted > 0


def test_lookahead_asks_for_no_head(target: PreTrainedModel) -> None:
    drafter = LookaheadDrafter.from_target(target, window_size=3, ngram_len=3, num_guesses=3)

    pair = runs.both(target, drafter, make_prompt(14).clamp(max=90), max_new_tokens=60)

    pair.assert_equal(is_kept=False)
    assert pair.stats.num_drafted > 0
