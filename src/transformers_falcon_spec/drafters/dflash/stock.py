"""DFlash drafters as Transformers has them: block-diffusion models behind `generate(..., speculation_type="dflash")`.

They are no drafters of this package and need none of it to run. The only classes of that kind in Transformers are
those of Muse-Glimmer's assistant; they take any target whose embeddings, layers and head have one width. Source: arXiv
2602.06036.
"""

import inspect
from typing import Any

from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel

from ...errors import DrafterMismatchError, OptionError
from ...generation.head import head_width, inner_width
from ...generation.model_parts import check_can_be_assisted, device_of, embedding_width, named
from ..config_fields import check_fields, context_of

DEFAULT_FEATURES = 5  # layers of the target that are read
LEAST_BLOCK = 2  # the root and one token to draft
ATTENTION = "full_attention"  # in every layer; windows would be those of Muse-Glimmer


def make_dflash(target: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """A fresh DFlash drafter for `target`, on its device; `options` are fields of `MuseGlimmerAssistantConfig`.

    Without options it has 5 layers and reads 5 of the target's, spread evenly from the second to the third last; a
    mask holds the embedding of the pad token, or of the last one in the vocabulary where there is no pad token.

    Raises:
        [`TargetError`]: stock assisted generation does not serve the target.
        [`DrafterMismatchError`]: embeddings, layers and head of `target` differ in width, or it takes no positions.
        [`OptionError`]: an option that is no field, or one that the target or the training does not allow.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    >>> target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes))
    >>> make_dflash(target, num_hidden_layers=1, block_size=4).config.target_layer_ids
    [1, 2, 3]

    ```
    """
    check_fields(MuseGlimmerAssistantConfig, options)
    check_can_be_assisted(target)
    if "position_ids" not in inspect.signature(target.forward).parameters:
        raise DrafterMismatchError(
            "DFlash needs a target that takes positions, since `generate` hands them on, but "
            f"`{type(target).__name__}` takes no `position_ids`. Train a drafter of another `method` for it."
        )
    config = config_for(MuseGlimmerAssistantConfig, target, options)
    if set(config.layer_types or ()) != {ATTENTION}:
        raise OptionError(f"`layer_types` must be `{ATTENTION}` in every layer, but they are {config.layer_types}.")
    return MuseGlimmerAssistantModel(config).eval().to(device=device_of(target))


def config_for(config_class: Any, target: PreTrainedModel, options: dict[str, Any]) -> Any:
    """A configuration of this class for `target`; `options` are fields of it, others an [`OptionError`]."""
    check_fields(config_class, options)
    text = target.config.get_text_config(decoder=True)
    widths = {"embeddings": embedding_width(target), "layers": text.hidden_size, "head": head_width(target)}
    if len(set(widths.values())) > 1:
        raise DrafterMismatchError(
            f"DFlash needs a target whose embeddings, layers and head have one width, but {named(target)} "
            f"has {widths}. Train a drafter of another `method` for it."
        )
    num_layers = options.get("num_hidden_layers", MuseGlimmerAssistantConfig.num_hidden_layers)
    config = config_class(**{**_sizes(target), "layer_types": [ATTENTION] * num_layers, **options})
    _check(config, text)
    return config


def context_layers(drafter: PreTrainedModel) -> tuple[int, ...]:
    """Hidden states of the target that this drafter reads; `target_layer_ids` count layers from 0."""
    return tuple(layer + 1 for layer in drafter.config.target_layer_ids)


def _sizes(target: PreTrainedModel) -> dict[str, Any]:
    """Fields that follow from the target."""
    text = target.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    first = min(1, text.num_hidden_layers - 2)
    last = max(text.num_hidden_layers - 3, first)
    spread = {first + round(number * (last - first) / (DEFAULT_FEATURES - 1)) for number in range(DEFAULT_FEATURES)}
    given = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    special_ids = {name: ids[0] if isinstance(ids, list) else ids for name, ids in given.items()}  # one has room
    pad = special_ids["pad_token_id"]
    rope = getattr(text, "rope_parameters", None) or {}
    return {
        "hidden_size": text.hidden_size,
        "intermediate_size": inner_width(target),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
        "max_position_embeddings": context_of(target.config) or MuseGlimmerAssistantConfig.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
        "target_layer_ids": sorted(spread),
        "mask_token_id": text.vocab_size - 1 if pad is None else pad,
        **special_ids,
    }


def _check(config: MuseGlimmerAssistantConfig, text: Any) -> None:
    """Refuse options that the target or the training does not allow."""
    if config.block_size < LEAST_BLOCK:
        raise OptionError(
            f"`block_size` must be at least {LEAST_BLOCK}, the root included, but it is {config.block_size}."
        )
    if config.hidden_size != text.hidden_size:
        raise OptionError(f"`hidden_size` must be the target's, {text.hidden_size}, but it is {config.hidden_size}.")
    if not 0 <= config.mask_token_id < text.vocab_size:
        raise OptionError(f"`mask_token_id` must lie in 0..{text.vocab_size - 1}, but it is {config.mask_token_id}.")
    layers, most = config.target_layer_ids or [], text.num_hidden_layers - 2
    if not layers or not all(0 <= layer <= most for layer in layers):
        raise OptionError(f"`target_layer_ids` must name layers in 0..{most}, but they are {layers}.")
