"""Reads and changes what is inside a cache of Transformers: keeps accepted paths, drops other slots, realigns rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache

from ..errors import GenerationError
from .static.slot_cache import SlotCache

HOLE = -1  # the position of a slot that holds padding or a dropped token
MAX_WASTE = 0.25  # share of slots that realigning must save to be worth reading and writing the cache once
_STATES = ("keys", "values", "indexer_keys")  # per-token states of a layer, tokens on the last axis but one
ENDLESS = 2**31  # more tokens than any text has


def new_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for `config` that can be cropped, sliding layers included."""
    return prepared(DynamicCache(config=config))


def growing(cache: Any, config: PreTrainedConfig) -> Any:
    """A `DynamicCache` of what a `StaticCache` holds; any other cache as it is."""
    if not isinstance(cache, StaticCache):
        return cache
    num_slots = int(cache.get_seq_length())
    if num_slots and any(_is_sliding(layer) for layer in cache.layers):
        raise GenerationError(
            "The `past_key_values` must hold every token that a window may need again, but they are a `StaticCache` "
            f"with sliding layers, filled with {num_slots} tokens. Pass the whole text without them."
        )
    dynamic, layers = DynamicCache(config=config), list[Any](cache.layers)
    for index, layer in enumerate(layers if num_slots else ()):
        dynamic.update(layer.keys[:, :, :num_slots].clone(), layer.values[:, :, :num_slots].clone(), index)
    return dynamic


def prepared(cache: Cache) -> Any:
    """Prepare a cache for dropping tokens again, and return it; sliding layers keep all slots until the next crop."""
    if cache.is_compileable or not isinstance(cache, DynamicCache):
        raise GenerationError(
            f"Speculative decoding needs a `DynamicCache`, but the call uses a `{type(cache).__name__}`. "
            "Leave out `cache_implementation` and `past_key_values`."
        )
    cache.activate_past_recording()
    return cache


def widen(cache: Cache) -> dict[int, int]:
    """Let sliding layers keep every slot, as holes would use up their window; returns the window of each layer."""
    layers: list[Any] = cache.layers
    windows = {index: layer.sliding_window for index, layer in enumerate(layers) if _is_sliding(layer)}
    for index, layer in enumerate(layers):
        if hasattr(layer, "conv_states"):
            raise GenerationError(
                f"`{type(layer).__name__}` keeps a state of all it read, which rows cannot take back by different "
                "amounts. Call `generate` once for each prompt."
            )
        if index in windows and layer.get_seq_length() >= windows[index]:
            raise GenerationError(
                "The `past_key_values` have dropped what left their sliding window, so that several rows cannot go on "
                "with them. Pass the whole text without them, or call `generate` once for each prompt."
            )
    for index in windows:
        layers[index].sliding_window = ENDLESS
    return windows


def narrow(cache: Cache, windows: dict[int, int]) -> None:
    """Give sliding layers their windows back, and let them drop at once what leaves those, as before [`prepared`]."""
    for index, window in windows.items():
        layer: Any = cache.layers[index]
        layer.sliding_window = window
        if layer.get_seq_length() >= window:
            layer.keys, layer.values = layer.keys[..., 1 - window :, :], layer.values[..., 1 - window :, :]
    for recording in _recording_layers(cache):
        recording.record_past = False


def num_held(cache: Cache, layer_index: int) -> int:
    """The number of slots that a layer holds; 0 before its first forward, or if it shares those of another layer."""
    if layer_index >= len(cache.layers):
        return 0
    keys = getattr(cache.layers[layer_index], "keys", None)
    return keys.shape[-2] if isinstance(keys, Tensor) and keys.numel() else 0


def drop_last(cache: Cache, num_slots: int) -> None:
    """Forget the slots read last; sliding layers shrink back to their window even if there are none to forget."""
    if num_slots:
        cache.crop(-num_slots)
        return
    for layer in _recording_layers(cache):
        layer.crop(0)


def empty(cache: Cache) -> None:
    """Free the states of a dynamic cache, which [`take_over`] brings back."""
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys, layer.values = (
            states.new_empty(*states.shape[:-2], 0, states.shape[-1]) for states in (layer.keys, layer.values)
        )


def take_over(cache: Cache, layers: Sequence[Any], slots: Tensor, frees: bool = False) -> None:
    """Let a dynamic cache hold the states in the `slots` `[rows, columns]` of other `layers`, which `frees` frees."""
    chosen = slots.clamp(min=0)
    for mine, layer in zip(cache.layers, layers, strict=True):
        recorded: Any = mine
        recorded.keys, recorded.values = (
            states.gather(-2, _spread(chosen, states)) for states in (layer.keys, layer.values)
        )
        if frees:
            layer.free()
        if _is_sliding(recorded):
            recorded.cumulative_length = slots.shape[1]
            recorded.crop(0)


class RowSlots:
    """The tokens in the slots of a cache, where rows accept different numbers of the tokens that they read together.

    `positions` `[rows, slots]` ascend in each row and are -1 at holes: the slot that a token would have if nothing had
    been dropped before it. A row that keeps fewer tokens than another gets holes, until rows are realigned.
    """

    def __init__(self, cache: Any, positions: Tensor) -> None:
        self.cache, self.positions = cache, positions
        is_held = positions != HOLE
        self.num_tokens: list[int] = is_held.sum(-1).tolist()  # of each row; known without asking the device
        self._num_gaps: list[int] = (~is_held & (is_held.cumsum(-1) > 0)).sum(-1).tolist()  # padding behind a token
        self._num_first = positions.shape[1]
        self.is_shifted = False  # some token is not in the slot of its position
        self.is_ragged = False  # some row has holes behind its tokens

    def __len__(self) -> int:
        """Slots, holes included."""
        return self.positions.shape[1]

    @property
    def has_gaps(self) -> bool:
        """Whether padding stands behind a token."""
        return any(self._num_gaps)

    @property
    def has_holes(self) -> bool:
        """Whether some slot holds no token, so that a mask must hide it."""
        return min(self.num_tokens) < len(self)

    def append(self, positions: Tensor, num_tokens: Sequence[int] | None = None) -> None:
        """Record tokens read at these positions `[rows, tokens]`; `num_tokens` of each row if some are holes."""
        self.positions = torch.cat([self.positions, positions], dim=-1)
        added = [positions.shape[1]] * len(positions) if num_tokens is None else num_tokens
        self.num_tokens = [old + new for old, new in zip(self.num_tokens, added, strict=True)]
        self.is_shifted = self.is_shifted or min(added) < positions.shape[1]

    def keep(self, num_nodes: int, paths: Sequence[Sequence[int]]) -> None:
        """Of the `num_nodes` slots read last keep those of each row's path, in their order, and drop the rest."""
        if all(list(path) == list(range(num_nodes)) for path in paths):  # all are kept, as after a plain step
            drop_last(self.cache, 0)
            return
        longest = max(map(len, paths))
        filled = [[*path, *[HOLE] * (longest - len(path))] for path in paths]
        kept = torch.tensor(filled, dtype=torch.long, device=self.positions.device)
        chosen = kept.clamp(min=0)
        moved = [index for path in paths for index, node in enumerate(path) if node != index]
        if moved:
            for _layer, _name, states in self._states():
                first = states.shape[-2] - num_nodes
                new = states.gather(-2, _spread(chosen[:, min(moved) :] + first, states))
                states.narrow(-2, first + min(moved), new.shape[-2]).copy_(new)
        start = len(self) - num_nodes
        positions = self.positions[:, start:].gather(1, chosen)
        if min(map(len, paths)) < longest:
            positions = positions.masked_fill(kept == HOLE, HOLE)
            self.is_shifted = self.is_ragged = True
        self.positions = torch.cat([self.positions[:, :start], positions], dim=-1)
        drop_last(self.cache, num_nodes - longest)
        self.num_tokens = [num - num_nodes + len(path) for num, path in zip(self.num_tokens, paths, strict=True)]

    def forget(self, num_tokens: Sequence[int]) -> None:
        """Drop the newest `num_tokens` of each row, which stand in its last slots or among holes."""
        if len(set(num_tokens)) == 1 and not self.has_holes:
            if num_tokens[0]:
                drop_last(self.cache, num_tokens[0])
                self.positions = self.positions[:, : -num_tokens[0]]
        else:
            first = self.positions.amax(-1) + 1 - torch.tensor(num_tokens, device=self.positions.device)
            self.positions = self.positions.masked_fill(self.positions >= first[:, None], HOLE)
            self.is_shifted = self.is_ragged = True
        self.num_tokens = [num - dropped for num, dropped in zip(self.num_tokens, num_tokens, strict=True)]

    def forget_drafted(self) -> None:
        """Drop the slots that a drafter filled while it drafted, of which layers may hold different numbers."""
        for index, layer in enumerate(self.cache.layers):
            layer.crop(min(len(self) - num_held(self.cache, index), 0))

    def tidy(self) -> None:
        """Realign the rows if that saves enough slots."""
        if len(self.positions) > 1 and len(self) - self._num_needed > MAX_WASTE * len(self):
            self._realign()

    def align(self) -> None:
        """Realign the rows if any has holes behind its tokens, for targets that count slots."""
        if self.is_ragged:
            self._realign()

    def _realign(self) -> None:
        """Move the newest token of every row to the last slot, and the others as far before it as their positions."""
        newest = self.positions.amax(-1, keepdim=True).clamp(min=self._num_first - 1)
        self._arrange(self.positions - newest + self._num_needed - 1, self._num_needed)
        self.is_shifted, self.is_ragged = True, False

    def unroll(self) -> None:
        """Put every token into the slot of its position, as in a cache that read the text without a drafter."""
        if self.is_shifted:
            self._arrange(self.positions, int(self.positions.max()) + 1)
            self.is_shifted = self.is_ragged = False

    @property
    def _num_needed(self) -> int:
        return max(num + gaps for num, gaps in zip(self.num_tokens, self._num_gaps, strict=True))

    def _arrange(self, slots: Tensor, num_slots: int) -> None:
        """Move the token in slot `s` of each row to slot `slots[row, s]` of `num_slots`; empty slots become holes."""
        slots = slots.masked_fill(self.positions == HOLE, num_slots)  # one too many, cut off
        order = torch.full((len(slots), num_slots + 1), HOLE, device=slots.device)
        order = order.scatter(1, slots, torch.arange(len(self), device=slots.device).expand_as(slots))[:, :-1]
        sources = order.clamp(min=0)
        self.positions = self.positions.gather(1, sources).masked_fill(order == HOLE, HOLE)
        for layer, name, states in self._states():
            setattr(layer, name, states.gather(-2, _spread(sources, states)))
        for layer in filter(_is_sliding, self.cache.layers):
            layer.cumulative_length = num_slots

    def _states(self) -> list[tuple[Any, str, Tensor]]:
        """All states of all layers, with where they are kept."""
        found = ((layer, name, getattr(layer, name, None)) for layer in self.cache.layers for name in _STATES)
        return [
            (layer, name, states) for layer, name, states in found if isinstance(states, Tensor) and states.numel()
        ]


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


def _spread(index: Tensor, states: Tensor) -> Tensor:
    """`[rows, slots]` repeated over the heads and entries of `[rows, ..., slots, size]`."""
    inner = index.to(states.device).reshape(len(index), *[1] * (states.dim() - 3), -1, 1)
    return inner.expand(*states.shape[:-2], -1, states.shape[-1])


def _recording_layers(cache: Cache) -> list[Any]:
    return [layer for layer in cache.layers if getattr(layer, "record_past", False)]


def _is_sliding(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))
