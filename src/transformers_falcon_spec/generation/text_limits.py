"""Lengths of text at which a target reads otherwise: rotary frequencies switch, or an attention index is full."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import GenerationError
from ..transformers_versions import CACHE
from .cache import ENDLESS, drop_last, new_cache
from .inputs import grown, text_length


def switch_lengths(config: PreTrainedConfig) -> list[int]:
    """The lengths of text after which `longrope` uses other frequencies for all tokens of a forward."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    return [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]


def longest_draftable(config: PreTrainedConfig) -> int:
    """The longest text of which an attention index (DeepSeek V3.2) keeps every token; endless without an index.

    The index gives exact zeros to several tokens at once. Which of them it keeps depends on how many slots are
    compared, and a tree fills more slots than plain decoding does.
    """
    return getattr(config, "index_topk", None) or ENDLESS


def num_before_limit(position: int, limits: Sequence[int]) -> int:
    """The number of tokens that fit between the one at `position` and the next of `limits`."""
    return min((limit for limit in limits if limit > position), default=position + 1) - 1 - position


def num_to_limits(
    config: PreTrainedConfig, switches: Sequence[int], text_len: int, counts: Iterable[tuple[int, int]]
) -> list[int]:
    """For each row the number of tokens that can be drafted before a limit of a target.

    `counts` are each row's next position id and tokens; frequencies switch with `text_len`, without padding.
    """
    context = getattr(config, "max_position_embeddings", None)
    limits, longest = [*switches, ENDLESS if context is None else context], longest_draftable(config)
    before_switch = num_before_limit(text_len, [*switches, ENDLESS])
    return [
        min(num_before_limit(position, limits), before_switch, num_before_limit(num_tokens, [longest]))
        for position, num_tokens in counts
    ]


def check_batch(
    model_config: PreTrainedConfig, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig
) -> None:
    """Raise an error for a batch of which one row would pass a limit and change what the others read."""
    num_rows, prompt_len = input_ids.shape
    if num_rows == 1:
        return
    mask, text_len = model_kwargs.get("attention_mask"), text_length(input_ids, model_kwargs, config)
    end, limit = config.max_length + text_len - prompt_len, longest_draftable(model_config)
    if end > limit:
        raise GenerationError(
            f"The rows of a batch may hold at most the {limit} tokens that this target's index keeps (`index_topk`), "
            f"but they may grow to {end}. Call `generate` once for each sequence, or end the texts before."
        )
    longest, switches = text_len if mask is None else int(mask.sum(-1).max()), switch_lengths(model_config)
    if any(longest <= switch < end for switch in switches):
        raise GenerationError(
            f"This target changes its rotary frequencies at {switches} tokens, which a batch cannot pass row by row: "
            "call `generate` once for each sequence, or end the text before."
        )


def read_anew(model: Any, token_ids: Tensor, cache: Cache, prompt_kwargs: dict[str, Any], num_new: int) -> Cache:
    """The cache with which plain decoding reads the newest token: a new one where the model drops its own (Phi3)."""
    held: dict[str, Any] = {CACHE: cache}
    outputs = CausalLMOutputWithPast(**held)
    kwargs = {**grown(model, outputs, prompt_kwargs, num_new), **held}
    inputs = model.prepare_inputs_for_generation(token_ids, **kwargs)
    if inputs.get(CACHE) is not None:
        return cache
    inputs[CACHE] = new_cache(model.config)
    model(**inputs, return_dict=True)
    drop_last(inputs[CACHE], 1)
    return inputs[CACHE]
