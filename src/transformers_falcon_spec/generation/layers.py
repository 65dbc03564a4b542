"""The kinds of attention in a target, read from its configuration: which there are, and what each may see."""

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedConfig


@dataclass(frozen=True)
class LayerKind:
    """One kind of attention and what it may see."""

    name: str
    layer_index: int  # a layer of this kind that holds slots
    sliding_window: int | None = None
    chunk_size: int | None = None


def layer_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """The kinds of attention in a model, by the rule of `masking_utils.create_masks_for_generate`."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    names = getattr(config, "layer_types", None)
    if names is None:
        return [LayerKind("full_attention", 0, window, None if window else chunk)]
    limits = {"sliding_attention": (window, None), "chunked_attention": (None, chunk)}
    return [LayerKind(name, list(names).index(name), *limits.get(name, (None, None))) for name in dict.fromkeys(names)]


def masks_by_kind(config: PreTrainedConfig, masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """A mask for each kind of layer, where the model looks them up by kind; else the only one."""
    return masks if getattr(config, "layer_types", None) is not None else next(iter(masks.values()))


def sliding_windows(config: PreTrainedConfig) -> list[int | None]:
    """How many slots the cache of each attention layer holds, a window or a chunk; None where it holds all. Convolutions are left out."""
    by_name = {kind.name: kind.sliding_window or kind.chunk_size for kind in layer_kinds(config)}
    names = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [by_name[name] for name in names if name != "conv"]
