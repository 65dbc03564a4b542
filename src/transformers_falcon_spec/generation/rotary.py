"""Targets whose rotary frequencies change with the length of the text, and which then read the whole text again."""

from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedConfig

from .cache import drop_last, new_cache
from .inputs import grown_to


def switch_lengths(config: PreTrainedConfig) -> list[int]:
    """Lengths of text after which `longrope` takes other frequencies, for every token of the forward that passes them."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    return [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]


def read_anew(model: Any, token_ids: Tensor, cache: Cache, prompt_kwargs: dict[str, Any], num_new: int) -> Cache:
    """The cache with which plain decoding reads the newest token: a fresh one where the model drops what it has (Phi3).

    Args:
        model ([`~transformers.PreTrainedModel`]): The target.
        token_ids (`torch.Tensor` of shape `(rows, tokens)`): The whole text, the newest token included.
        cache ([`~transformers.Cache`]): Everything but the newest token.
        prompt_kwargs (`dict`): What the prompt was read with.
        num_new (`int`): Tokens after the prompt.
    """
    kwargs = {**grown_to(model, cache, prompt_kwargs, num_new), "past_key_values": cache}
    inputs = model.prepare_inputs_for_generation(token_ids, **kwargs)
    if inputs.get("past_key_values") is not None:
        return cache
    inputs["past_key_values"] = new_cache(model.config)
    model(**inputs, return_dict=True)
    drop_last(inputs["past_key_values"], 1)
    return inputs["past_key_values"]
