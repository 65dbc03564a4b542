"""The only file that knows what is inside a cache of Transformers: how many slots it holds, and how to keep a path."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from ..errors import GenerationError

_STATES = ("keys", "values", "indexer_keys")  # per-token states of a layer, tokens on the last axis but one


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for `config` that can be cropped, sliding layers included."""
    return prepared(DynamicCache(config=config))


def prepared(cache: Cache) -> Any:
    """`cache`, ready to take back what it read; sliding layers keep their past until the next crop.

    Raises:
        [`GenerationError`]: a kind of cache whose slots cannot be taken back.
    """
    if cache.is_compileable or not isinstance(cache, DynamicCache):
        raise GenerationError(
            f"Speculative decoding needs a `DynamicCache`, but the call uses a `{type(cache).__name__}`. "
            "Leave out `cache_implementation` and `past_key_values`."
        )
    cache.activate_past_recording()
    return cache


def stop_recording(cache: Cache) -> None:
    """Sliding layers drop what leaves their window at once again, as they did before [`prepared`]."""
    for layer in _recording_layers(cache):
        layer.record_past = False


def num_held(cache: Cache, layer_index: int) -> int:
    """Slots that a layer holds now; 0 where it has not read yet or shares those of another layer."""
    if layer_index >= len(cache.layers):
        return 0
    keys = getattr(cache.layers[layer_index], "keys", None)
    return keys.shape[-2] if isinstance(keys, Tensor) and keys.numel() else 0


def keep_path(cache: Cache, num_nodes: int, path: Sequence[int]) -> None:
    """Of the `num_nodes` slots read last keep those of `path`, in place, and drop the rest.

    Args:
        cache ([`~transformers.Cache`]): The target's cache, right after it read a tree of one row.
        num_nodes (`int`): Nodes of that tree.
        path (`Sequence[int]`): The kept nodes, root first.
    """
    if list(path) != list(range(len(path))):
        for layer in cache.layers:
            for states in (getattr(layer, name, None) for name in _STATES):
                if isinstance(states, Tensor) and states.numel():
                    _gather(states, num_nodes, path)
    drop_last(cache, num_nodes - len(path))


def _gather(states: Tensor, num_nodes: int, path: Sequence[int]) -> None:
    start = states.shape[-2] - num_nodes
    kept = states[..., start:, :].index_select(-2, torch.tensor(path, device=states.device))
    states[..., start : start + len(path), :] = kept


def drop_last(cache: Cache, num_slots: int) -> None:
    """Forget the slots read last; sliding layers shrink back to their window even if there are none to forget."""
    if num_slots:
        cache.crop(-num_slots)
        return
    for layer in _recording_layers(cache):
        layer.crop(0)


def _recording_layers(cache: Cache) -> list[Any]:
    return [layer for layer in cache.layers if getattr(layer, "record_past", False)]
