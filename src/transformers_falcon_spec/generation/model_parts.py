"""Parts of a model and facts about them: decoder, head, embeddings, their widths, and the kinds of attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import TargetError


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part whose output the head reads; if a model names itself (text-only Llama 4), the part with embeddings."""
    decoder = model.get_decoder()
    if decoder is not model:
        return decoder
    embeddings = model.get_input_embeddings()
    return next(part for part in model.children() if any(inner is embeddings for inner in part.modules()))


def is_spread(model: PreTrainedModel) -> bool:
    """Whether the parts of a model are spread over several devices or disk, and move their inputs themselves."""
    return len(set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))) > 1


def cuda_devices(model: PreTrainedModel) -> list[torch.device]:
    """The CUDA devices of a model's weights."""
    return sorted({weight.device for weight in model.parameters() if weight.device.type == "cuda"}, key=str)


def named(model: PreTrainedModel) -> str:
    """The name of a model in messages: its name or path, or else its class."""
    return f"`{model.config._name_or_path or type(model).__name__}`"


def check_can_be_assisted(model: PreTrainedModel) -> None:
    """Raise an error for a target with a recurrent state, which stock assisted generation does not take."""
    if model._is_stateful:
        raise TargetError(
            "Stock assisted generation needs a target whose cache can be cut back to the tokens that were kept, but a "
            f"`{type(model).__name__}` keeps a state of all that it read. Choose a target whose layers are all "
            "attention."
        )


def head_width(model: PreTrainedModel) -> int:
    """Width of what the head reads; not the hidden size where the decoder ends in a projection (OPT-350m)."""
    hidden_size: int = model.config.get_text_config(decoder=True).hidden_size
    return getattr(model.get_output_embeddings(), "in_features", hidden_size)


def inner_width(model: PreTrainedModel) -> int:
    """Width between the two halves of a feed-forward layer; the widest one where layers differ (Gemma 3n)."""
    size = getattr(model.config.get_text_config(decoder=True), "intermediate_size", None)
    return max(size) if isinstance(size, list) else size or 4 * head_width(model)


def embedding_width(model: PreTrainedModel) -> int:
    """Width of a token's embedding."""
    embeddings: Any = model.get_input_embeddings()  # an `nn.Embedding`, or a wrapper around one
    return embeddings.weight.shape[-1]


def feature_width(model: PreTrainedModel, feature_layers: Sequence[int]) -> int:
    """Width of one token's features; -1 is the input of the head."""
    hidden_size: int = model.config.get_text_config(decoder=True).hidden_size
    return sum(head_width(model) if layer == -1 else hidden_size for layer in feature_layers)


def reading_all_tokens(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a prefill in which every layer reads the whole prompt, also those that share keys (Gemma 4)."""
    is_shared = getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    if not is_shared or model_kwargs.get("logits_to_keep") != 1:
        return model_kwargs
    # given by number, tokens whose logits are not wanted would be left out; given by index they are not
    return {**model_kwargs, "logits_to_keep": torch.tensor([-1], device=model.device)}


def apply_head(model: PreTrainedModel, features: Tensor, is_scaled: bool = True) -> Tensor:
    """The logits of the head, with scaling and caps by the model's configuration; the probe checks them."""
    config = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    if not is_scaled:
        return head(features.to(model.dtype)).float()
    narrowing = None if hasattr(config, "logits_scaling") else getattr(config, "dim_model_base", None)
    states = features if narrowing is None else features / (config.hidden_size / narrowing)
    logits = head(states.to(model.dtype)).float()  # a drafter may compute in another type than the target
    for name, is_divisor in (("logit_scale", False), ("logits_scaling", True), ("lm_head_multiplier", False)):
        factor = getattr(config, name, None)
        if factor is not None:
            logits = logits / factor if is_divisor else logits * factor
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@dataclass(frozen=True)
class LayerKind:
    """One kind of attention and what it may see."""

    name: str
    layer_index: int  # the first layer of this kind; layers that share another's cache come later
    sliding_window: int | None = None
    chunk_size: int | None = None


def layer_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """The kinds of attention in a model, as Transformers' `create_masks_for_generate` distinguishes them."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    names = getattr(config, "layer_types", None)
    if names is None:
        return [LayerKind("full_attention", 0, window, None if window else chunk)]
    limits = {"sliding_attention": (window, None), "chunked_attention": (None, chunk)}
    return [LayerKind(name, list(names).index(name), *limits.get(name, (None, None))) for name in dict.fromkeys(names)]


def masks_by_kind(config: PreTrainedConfig, masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """The masks in the form that the model takes: all if its forward picks one by `layer_types`, or the only one."""
    return masks if getattr(config, "layer_types", None) is not None else next(iter(masks.values()))


def sliding_windows(config: PreTrainedConfig) -> list[int | None]:
    """The number of slots in the cache of each attention layer, a window or a chunk; None where it holds all."""
    by_name = {kind.name: kind.sliding_window or kind.chunk_size for kind in layer_kinds(config)}
    names = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [by_name[name] for name in names if name != "conv"]
