"""A cache of fixed size whose rows grow at their own pace: states are written to slots that a tensor names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer

from ..text_cache import copies_of

SPARE_SLOTS = 8  # behind the last, for the memory of shown slots never to be in one piece: that would be another shape


@dataclass
class SlotView:
    """What a forward sees and writes; layers hold it and not their cache, which is free once nobody else has it."""

    num_shown: int  # slots that attention sees
    slots: Tensor  # [rows, nodes] that the next forward writes
    first: int | None = None  # the first of them, where they follow it and are the same in all rows


class SlotLayer(StaticLayer):
    """One layer's keys and values `[rows, heads, capacity, size]`, of which attention sees the first slots."""

    is_sliding = False  # masks say what a window hides
    keys: Any
    values: Any
    seen: list[Tensor]  # of both the slots that attention sees

    def __init__(self, view: SlotView, capacity: int) -> None:
        super().__init__(capacity)
        self._view = view

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocate the buffers, so that calls inside and outside of inference mode can write to them."""
        assert value_states is not None  # every version that calls with keys alone has its own layer
        self.dtype, self.device = key_states.dtype, key_states.device
        size = self.max_cache_len + SPARE_SLOTS
        with torch.inference_mode(False):
            self.keys, self.values = (
                states.new_zeros(*states.shape[:2], size, states.shape[-1])[:, :, :-SPARE_SLOTS]
                for states in (key_states, value_states)
            )
        self.is_initialized = True
        self.see(self._view.num_shown)

    def see(self, num_slots: int) -> None:
        """Let attention see the first slots alone."""
        if self.is_initialized:
            self.seen = [_first_slots(states, num_slots) for states in (self.keys, self.values)]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write states `[rows, heads, nodes, size]` to the slots of the nodes; returns those of all shown slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.update_heads(0, key_states, value_states)

    def update_heads(self, first: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """[`SlotLayer.update`] of some heads alone, from number `first` on, of a layer that holds states."""
        keys, values = (states[:, first : first + key_states.shape[1]] for states in self.seen)
        for states, new in ((keys, key_states), (values, value_states)):
            if self._view.first is None:
                states.scatter_(2, _spread(self._view.slots, new), new)
            else:
                states.narrow(2, self._view.first, new.shape[2]).copy_(new)
        return keys, values

    def free(self) -> None:
        """Free the states, once nobody reads them."""
        self.keys = self.values = None
        self.seen, self.is_initialized = [], False

    def get_seq_length(self) -> int:
        """Nothing: positions and masks are given with every forward, and nobody asks the device for a length."""
        return 0

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the states in slots `sources` `[rows, num]` to `targets`, all at once."""
        for states in (self.keys, self.values):
            shape = states[:, :, : sources.shape[1]]
            states.scatter_(2, _spread(targets, shape), states.gather(2, _spread(sources, shape)))


class SlotCache(Cache):
    """The layers of a model, and the slots that its next forward writes.

    Row `r` holds its text in slots `0 .. lengths[r] - 1`, without padding. A forward writes its nodes behind it.
    """

    layers: list[Any]

    def __init__(self, num_layers: int, num_rows: int, capacity: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.lengths = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
            self.view = SlotView(capacity, torch.zeros_like(self.lengths))
        super().__init__(layers=[SlotLayer(self.view, capacity) for _ in range(num_layers)])
        self.capacity = capacity

    def see(self, num_slots: int) -> None:
        """Let the next forwards see the first slots alone."""
        if num_slots != self.view.num_shown:
            self.view.num_shown = num_slots
            for layer in self.layers:
                layer.see(num_slots)

    def show(self, num_nodes: int, num_shown: int) -> None:
        """Prepare a forward of `num_nodes` nodes behind each row's text, which sees the first `num_shown` slots."""
        self.see(min(num_shown, self.capacity))
        steps = torch.arange(num_nodes, device=self.lengths.device)
        self.view.slots = (self.lengths + steps).clamp(max=self.view.num_shown - 1)

    def grow(self, capacity: int) -> None:
        """Make room for more slots, layer by layer, so that only one layer at a time is held twice."""
        for layer in self.layers:
            layer.max_cache_len, old = capacity, (layer.keys, layer.values)
            if layer.is_initialized:
                layer.lazy_initialization(*old)
                layer.keys[:, :, : self.capacity].copy_(old[0])
                layer.values[:, :, : self.capacity].copy_(old[1])
        self.capacity = capacity
        self.see(capacity)

    def fill(self, layers: Iterable[Any], slots: Tensor) -> None:
        """Take over the states of a dynamic cache: column `c` goes to slot `slots[row, c]`, nowhere if that is -1.

        The host is asked once, which slots these are.
        """
        columns = slots.tolist()
        for mine, layer in zip(self.layers, layers, strict=True):
            if not mine.is_initialized:
                mine.lazy_initialization(layer.keys, layer.values)
            copies = copies_of(columns, layer.keys.shape[-2], [0] * len(columns))
            for states, old in ((mine.keys, layer.keys), (mine.values, layer.values)):
                states.zero_()  # masked slots must hold finite numbers, and an earlier text may have overflowed
                for row, taken, first, num in copies:
                    states[row, :, first : first + num].copy_(old[row, :, taken])
        self.lengths.copy_((slots >= 0).sum(-1, keepdim=True))

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.lengths = self.lengths[rows]
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
                layer.see(self.view.num_shown)

    def forget(self, slots: Tensor) -> None:
        """Overwrite the states in `slots` `[rows, num]`: masked ones must be finite, as 0 times NaN is NaN."""
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                states.scatter_(2, _spread(slots, states), 0.0)

    def keep(self, path: Tensor, num_kept: Tensor) -> None:
        """Keep the nodes `path` `[rows, depths]` of the last forward, of each row the first `num_kept` `[rows, 1]`."""
        steps = torch.arange(path.shape[1], device=path.device)
        if path.shape[1] > 1:
            targets = (self.lengths + steps).clamp(max=self.capacity - 1)
            kept = (self.lengths + path).clamp(max=self.capacity - 1)
            sources = torch.where(steps < num_kept, kept, targets)  # what is not kept stays where it is
            for layer in self.layers:
                layer.move(sources, targets)
        self.lengths.add_(num_kept)


def _first_slots(states: Tensor, num_slots: int) -> Tensor:
    """The first slots of states `[rows, heads, capacity, size]`, in the same memory.

    This is no view: the size of a view's base would be a fixed shape of what is compiled.
    """
    shape = (*states.shape[:2], num_slots, states.shape[3])
    with torch.inference_mode(False):
        return states.new_empty(0).set_(states.untyped_storage(), 0, shape, states.stride())


def _spread(slots: Tensor, states: Tensor) -> Tensor:
    """`[rows, num]` for every head and entry of states `[rows, heads, num, size]`."""
    return slots[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
