"""A cache in which one layer keeps the heads of several, which are read as a group."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...generation.cache import num_held
from ...generation.static.slot_cache import SlotCache


class GroupSlice:
    """A cache as one layer of a group sees it: its layer `number` keeps the heads of all `layers`, read in order."""

    def __init__(self, cache: Any, number: int, layers: Sequence[int]) -> None:
        self.cache, self._number, self._layers = cache, number, list(layers)
        self._new: list[tuple[Tensor, Tensor]] = []

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new states `[rows, layers * heads, tokens, size]` of all layers; returns the states of all tokens."""
        return self.cache.update(keys, values, self._number)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add one layer's new states `[rows, heads, tokens, size]`; returns those of all its tokens."""
        if len(self._layers) == 1:
            return self.extend(keys, values)
        index, num_heads = self._layers.index(layer_idx), keys.shape[1]
        if isinstance(self.cache, SlotCache):
            return self.cache.layers[self._number].update_heads(index * num_heads, keys, values)
        assert index == len(self._new)  # layers are read in order
        joined = (keys, values)
        if num_held(self.cache, self._number):
            held, heads = self.cache.layers[self._number], slice(index * num_heads, (index + 1) * num_heads)
            joined = (
                torch.cat([held.keys[:, heads], keys], dim=-2),
                torch.cat([held.values[:, heads], values], dim=-2),
            )
        self._new.append((keys, values))
        if len(self._new) == len(self._layers):  # only now, lest the others read what is newer than themselves
            self.extend(*(torch.cat(parts, dim=1) for parts in zip(*self._new, strict=True)))
        return joined
