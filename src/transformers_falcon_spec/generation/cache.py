"""Reads and changes what is inside a cache of Transformers: drops slots, and empties layers."""

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, StaticLayer

from ..errors import GenerationError
from ..transformers_versions import CACHE

HOLE = -1  # the position of a slot that holds padding or a dropped token
ENDLESS = 2**31  # more tokens than any text has


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for `config` that can be cropped, sliding layers included."""
    return prepared(DynamicCache(config=config))


def growing(cache: Any, config: PreTrainedConfig) -> Any:
    """A `DynamicCache` of what a `StaticCache` holds; any other cache as it is."""
    if not isinstance(cache, StaticCache):
        return cache
    num_slots = int(cache.get_seq_length())
    if num_slots and any(is_sliding(layer) for layer in cache.layers):
        raise GenerationError(
            f"The `{CACHE}` must hold every token that a window may need again, but they are a `StaticCache` "
            f"with sliding layers, filled with {num_slots} tokens. Pass the whole text without them."
        )
    dynamic, layers = DynamicCache(config=config), list[Any](cache.layers)
    for index, layer in enumerate(layers if num_slots else ()):
        dynamic.update(layer.keys[:, :, :num_slots].clone(), layer.values[:, :, :num_slots].clone(), index)
    return dynamic


def prepared(cache: Cache) -> Any:
    """Prepare a cache for dropping tokens again, and return it; sliding layers keep all slots until the next crop."""
    if not isinstance(cache, DynamicCache) or any(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise GenerationError(
            f"Speculative decoding needs a `DynamicCache`, but the call uses a `{type(cache).__name__}`. "
            f"Leave out `cache_implementation` and `{CACHE}`."
        )
    record(cache)
    return cache


def record(cache: Any) -> None:
    """Let sliding layers keep what they would drop until the next crop; recurrent ones cannot be cropped."""
    cache.activate_past_recording()
    for layer in filter(is_recurrent, cache.layers):
        layer.record_past = False


def stop_recording(cache: Cache) -> None:
    """Let sliding layers drop at once what leaves their window, as before [`prepared`]."""
    for layer in _recording_layers(cache):
        if num_held_by(layer):
            layer.crop(0)
        layer.record_past = False


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """The tensors that a layer keeps, by name; single numbers are none."""
    tensors = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if value.dim() > 0 and value.numel() > 0}


def num_tokens(cache: Any, otherwise: int = 0) -> int:
    """The tokens that a cache holds, or `otherwise` where none of its layers counts them, as all are recurrent."""
    counts = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    return int(cache.get_seq_length()) if counts else otherwise


def num_held(cache: Cache, layer_index: int) -> int:
    """The number of slots that a layer holds; 0 before its first forward, or if it shares those of another layer."""
    return num_held_by(cache.layers[layer_index]) if layer_index < len(cache.layers) else 0


def num_held_by(layer: Any) -> int:
    """The number of slots that a layer holds, as [`num_held`]."""
    keys = getattr(layer, "keys", None)
    return keys.shape[-2] if isinstance(keys, Tensor) and keys.numel() else 0


def drop_last(cache: Cache, num_slots: int) -> None:
    """Forget the slots read last; sliding layers shrink back to their window even if there are none to forget."""
    if num_slots:
        for each in cache.layers:
            _crop(each, num_slots)
        return
    for layer in _recording_layers(cache):
        layer.crop(0)


def _crop(layer: Any, num_slots: int) -> None:
    if not is_recurrent(layer):
        layer.crop(-num_slots)
        return
    attention: Any = super(LinearAttentionCacheLayerMixin, layer)  # of a layer that is both
    if hasattr(attention, "crop"):
        attention.crop(-num_slots)


def is_recurrent(layer: Any) -> bool:
    """Whether a layer keeps a state that cannot be cropped."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def empty(cache: Cache) -> None:
    """Free the states of a cache."""
    for layer in cache.layers:
        empty_layer(layer)


def empty_layer(layer: Any) -> None:
    """Free the states of a layer."""
    for name, states in tensors_of(layer).items():
        axis = states.dim() - 2  # of its slots
        setattr(layer, name, states.narrow(axis, 0, 0).clone())


def spread(index: Tensor, states: Tensor) -> Tensor:
    """`[rows, slots]` repeated over the heads and entries of `[rows, ..., slots, size]`."""
    inner = index.to(states.device).reshape(len(index), *[1] * (states.dim() - 3), -1, 1)
    return inner.expand(*states.shape[:-2], -1, states.shape[-1])


def _recording_layers(cache: Cache) -> list[Any]:
    return [layer for layer in cache.layers if getattr(layer, "record_past", False)]


def is_sliding(layer: Any) -> bool:
    """Whether a layer keeps a window of the text alone."""
    return bool(getattr(layer, "is_sliding", False))
