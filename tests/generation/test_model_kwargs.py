"""Arguments of the target's `forward`: what plain decoding feeds at every step reaches every read of a draft, or is refused by name."""

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import TransformersKwargs

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.families import DRAFTED
from tests.generation import test_vision as vision
from tests.generation.model_kwargs import LENGTH, SEEN, VALUES, prompts
from tests.tiny import in_double, make_target
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.transformers_versions import CACHE, FORGETS_DROPPED_TEXT

pytestmark = pytest.mark.families

GENERAL = sorted(TransformersKwargs.__optional_keys__)
WITH_GENERAL = {"llama", "gpt2", "gemma3", "mixtral", "lfm2", "bloom", "gpt_neo"}  # each form and kind of layer
SLOW_VISION = [("qwen3_vl", "position_ids"), ("qwen3_vl", "mm_token_type_ids"), ("mistral3", "position_ids")]
SLOW_VISION += [("llava", "position_ids"), ("mistral3", "image_sizes")]
QUICK = [  # one of each kind; the whole sweep is slow
    *((family, "token_type_ids") for family in ("gpt2", "gptj", "codegen", "gpt_bigcode", "gpt_neo")),
    *((family, "position_ids") for family in ("llama", "gpt2", "gemma3", "falcon_alibi")),
    *(("llama", name) for name in ("attention_mask", "is_causal", "logits_to_keep", "labels", CACHE)),
    *(("gpt_neo", "is_causal"), ("lfm2", "is_causal"), ("mixtral", "output_router_logits")),
]

VISION = [
    *(("qwen2_5_vl", name) for name in ("position_ids", "mm_token_type_ids", "image_grid_thw")),
    *(("gemma3", "position_ids"), ("gemma3", "token_type_ids"), ("llava", "vision_feature_layer")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_VISION),
]


def parameters(family: str) -> list[str]:
    """All that `forward` takes and plain `generate` may let through; what every `forward` takes is tried on a few."""
    own = inspect.signature(target_of(family).forward).parameters
    general = GENERAL if family in WITH_GENERAL else ["is_causal"]
    return sorted({*own, *general} - {"kwargs", "input_ids", "return_dict"})


def outcome(target: PreTrainedModel, name: str, rows: int, options: dict[str, Any], prompt: Tensor) -> str:
    """What becomes of a call with `options`: `"equal"`, `"refused"`, or `"not let through"` by plain decoding."""
    make = options.pop("make", dict)
    try:
        gold = runs.plain(target, prompt, **options, **make()).sequences
    except Exception:  # noqa: BLE001  whatever Transformers or the model raises
        return "not let through"
    drafter = InformedDrafter(RandomDrafter(num_nodes=12), gold, mask=options.get("attention_mask"))
    before, refusal = runs.traces(target), ""
    try:
        drafted = runs.drafted(target, drafter, prompt, **options, **make())
    except GenerationError as error:
        refusal = str(error)
    if refusal:
        has_batched_state = rows > 1 and "conv" in str(target.config)  # refused whatever is passed
        assert f"`{name}`" in refusal or (has_batched_state and "keeps a state of all it read" in refusal)
        assert runs.traces(target) == before
        return "refused"
    assert drafted.sequences.tolist() == gold.tolist()
    assert drafted.speculation.num_accepted > 0
    return "equal"


@lru_cache(maxsize=2)  # the trials of one family come one after the other
def target_of(family: str, attention: str | None = None) -> PreTrainedModel:
    return in_double(make_target(family, seed=7, attn_implementation=attention))


def trial(family: str, name: str, rows: int, **options: Any) -> str:
    target = target_of(family, "eager" if name == "output_attentions" else None)
    assert name in VALUES, f"`{name}` of {family} is new: say in `VALUES` what to try"
    return outcome(target, name, rows, {**VALUES[name](target, rows), **options}, prompts(rows))


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "name"), QUICK)
def test_an_argument_of_forward_reaches_every_read(family: str, name: str, rows: int) -> None:
    found = trial(family, name, rows)

    assert found == ("refused" if (family, rows) == ("lfm2", 2) else "equal")
    if name in SEEN:
        target = target_of(family)
        options = VALUES[name](target, rows)
        with_it, without = (runs.plain(target, prompts(rows), **each).sequences for each in (options, {}))
        assert with_it.tolist() != without.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", DRAFTED)
def test_every_argument_that_plain_decoding_lets_through_gives_its_text_or_is_refused(family: str, rows: int) -> None:
    found = {name: trial(family, name, rows, max_new_tokens=10) for name in parameters(family)}

    assert found["attention_mask"] == found["labels"] != "not let through"
    assert found["inputs_embeds"] == ("not let through" if "gemma4" in family else "refused")


@pytest.mark.parametrize(("family", "name"), VISION)
def test_a_vision_language_target_is_fed_as_plain_decoding_feeds_it(family: str, name: str) -> None:
    target = vision._make_target(family)
    prompt, extras = vision._with_image(family)
    given = {
        "position_ids": 3 * torch.arange(prompt.shape[1]).expand(4 if family.startswith("qwen") else 1, 1, -1),
        "vision_feature_layer": -1,
    }.get(name, extras.get(name))
    if name == "position_ids" and not family.startswith("qwen"):
        given = given[0]

    found = outcome(target, name, 1, {**extras, name: given}, prompt)

    assert found == "equal"
    if name not in extras and name != "vision_feature_layer":  # -1 is what it is without
        first = [
            runs.plain(target, prompt, **each, max_new_tokens=1, output_logits=True)
            for each in (extras, {**extras, name: given})
        ]
        assert (first[0].logits[0] - first[1].logits[0]).abs().max() > 0.1


@pytest.mark.skipif(FORGETS_DROPPED_TEXT, reason="Transformers before 5.20 forgets the text there, which is refused")
def test_positions_that_the_user_gives_hold_after_the_rotary_switch() -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 24}
    longrope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    changes = {"max_position_embeddings": 96, "rope_parameters": longrope, "original_max_position_embeddings": 24}
    target = in_double(make_target("phi3", seed=3, **changes))
    prompt = prompts(1)
    positions = torch.arange(LENGTH)[None] * 2 - LENGTH // 2  # the switch goes by tokens, not by these
    options = {"position_ids": positions.clamp(min=0), "max_new_tokens": 25}

    assert (
        runs.plain(target, prompt, **options).sequences.tolist()
        != runs.plain(target, prompt, max_new_tokens=25).sequences.tolist()
    )
    assert outcome(target, "position_ids", 1, options, prompt) == "equal"


def test_an_argument_that_each_step_takes_something_out_of_is_refused() -> None:
    def numbers() -> Iterator[int]:
        yield from range(99)

    with pytest.raises(GenerationError, match=r"`labels` must be the same at every step, but it is a generator"):
        runs.drafted(make_target(), RandomDrafter(), labels=numbers())
