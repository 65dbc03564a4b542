"""Keys and values in slots, for the texts of targets and of drafters.

A forward writes the states of its tokens to the slots that a view names, and attention sees the first slots. Nothing
here knows of prompts, drafts or windows. [`Shapes`] says how large the tensors of a step are: as large as it takes, or
one of a few sizes, so that captured work repeats.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from ..errors import GenerationError

NODE_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512)  # to which trees are filled up
DEPTH_BUCKETS = (0, 4, 8, 16, 32, 64, 128, 256, 512)  # to which they are walked
NUM_TOGETHER = 16  # states in one tensor, of 8 layers: what is held twice while it is made or grows
SPARE_SLOTS = 8  # behind the last, for the memory of shown slots never to be in one piece: that would be another shape


class SlotView:
    """What layers of one kind hold, and what the next forward writes and sees there."""

    num_held: int | None = None  # tokens of the longest text; None: the host does not know, and nobody may ask

    def __init__(self, num_rows: int, capacity: int = 0) -> None:
        self.capacity = capacity
        self.num_dropped = [0] * num_rows  # tokens in front of a row's first slot
        self.num_shown = capacity  # slots that attention sees
        self.slots: Tensor | None = None  # [rows, tokens] that are written, where rows differ in them
        self.first = 0  # that is written, where they do not
        self.rows: Tensor | None = None  # of which the next forward is; None: of all
        self.turn = 0  # number of the forward, where the host counts

    def write_from(self, first: int) -> None:
        """Let the next forward write the slots from this one on, in all rows."""
        self.first = first
        self.slots = None

    def write_to(self, slots: Tensor) -> None:
        """Let the next forward write these slots `[rows, tokens]`."""
        self.slots = slots

    def shown(self, states: Tensor) -> Tensor:
        """The first slots of states `[rows, heads, capacity, size]`, in the same memory.

        This is no view of PyTorch: the size of its base would be a fixed shape of what is compiled.
        """
        shape = (*states.shape[:2], self.num_shown, states.shape[3])
        with torch.inference_mode(False):
            return states.new_empty(0).set_(states.untyped_storage(), states.storage_offset(), shape, states.stride())


class SlotLayer(DynamicLayer):
    """What one layer keeps, by name; nothing if it shares the states of another layer.

    States are `[rows, heads, capacity, size]`; an indexer's, which have no heads in Transformers, have one here.
    """

    def __init__(self, view: SlotView, window: int | None = None) -> None:
        super().__init__()
        self.view = view
        self.is_sliding = window is not None
        self.held: dict[str, Tensor] = {}
        self.seen: dict[str, Tensor] = {}  # the slots of them that attention sees
        self._num_read, self._turn = 0, 0  # tokens of the newest forward that came here, and its number

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write states `[rows, heads, tokens, size]` to their slots; returns those of all slots that are shown."""
        if self.view.num_held is not None:
            self._num_read, self._turn = key_states.shape[2], self.view.turn
        return self._write("keys", key_states), self._write("values", value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The same of an indexer's keys `[rows, tokens, size]`."""
        return self._write("indexer_keys", indexer_key_states[:, None])[:, 0]

    def update_heads(self, first: int, num_heads: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """[`SlotLayer.update`] of some heads alone, from number `first` on, of a layer that has `num_heads`."""
        return self._write("keys", keys, first, num_heads), self._write("values", values, first, num_heads)

    def _write(self, name: str, new: Tensor, first_head: int = 0, num_heads: int | None = None) -> Tensor:
        view = self.view
        if name not in self.seen:
            self.hold(name, new, num_heads)
        states = self.seen[name]
        if num_heads is not None:
            states = states[:, first_head : first_head + new.shape[1]]

        if view.slots is not None:
            states.scatter_(2, spread(view.slots, new), new)
            return states
        if view.rows is None:
            states.narrow(2, view.first, new.shape[2]).copy_(new)
            return states

        rows = view.rows.to(states.device)
        states[rows, :, view.first : view.first + new.shape[2]] = new
        return states[rows]

    def get_seq_length(self) -> int:
        """The tokens of the longest text that is read, and the new ones once they are written; 0 if nobody counts."""
        num_held = self.view.num_held
        if num_held is None:
            return 0
        return num_held + (self._num_read if self._turn == self.view.turn else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The slots that are shown, and the position of the first of them."""
        view = self.view
        return view.num_shown, 0 if view.num_held is None else view.num_held + query_length - view.num_shown

    def hold(self, name: str, states: Tensor, num_heads: int | None = None) -> None:
        """Make room for states like these `[rows, heads, any, size]`, as much as the view says."""
        self.held[name] = room(states, num_heads or states.shape[1], self.view.capacity)
        self.is_initialized = True
        self.see()

    def see(self) -> None:
        """Let attention see the slots alone that the view shows."""
        for name, states in self.held.items():
            self.seen[name] = self.view.shown(states)
        self.keys = self.seen.get("keys")  # some models (Mllama) look whether a layer has any

    def grow(self) -> None:
        """Make room for the capacity of the view; what is held stays."""
        for name, states in list(self.held.items()):
            self.hold(name, states)
            self.held[name][:, :, : states.shape[2]].copy_(states)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        for name, states in self.held.items():
            self.held[name] = states[list(rows)]
        self.see()

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the states in slots `sources` `[rows, num]` to `targets`, all at once."""
        for states in self.held.values():
            move(states, sources, targets)

    def free(self) -> None:
        """Free the states, once nobody reads them."""
        self.held, self.seen, self.keys, self.is_initialized = {}, {}, None, False


class SlotCache(Cache):
    """A cache of which the device knows how long each text is.

    Row `r` holds its text in slots `0 .. lengths[r] - 1`, without padding. A forward writes its nodes behind it.
    """

    layers: list[Any]

    @torch.inference_mode(False)
    def __init__(self, num_layers: int, num_rows: int, capacity: int, device: torch.device) -> None:
        self.lengths = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self.view = SlotView(num_rows, capacity)
        self.view.write_to(torch.zeros_like(self.lengths))
        super().__init__(layers=[SlotLayer(self.view) for _ in range(num_layers)])
        self._joined: list[Tensor] = []  # all states, those of several layers as heads of one tensor

    @property
    def states(self) -> list[Tensor]:
        """All that is held, `[rows, heads, capacity, size]` each, in as few tensors as there are."""
        return self._joined or [states for layer in self.layers for states in layer.held.values()]

    def join(self) -> None:
        """Let several layers hold their states in one tensor, so that all of them move at once."""
        if self._joined:
            return
        alike = defaultdict(list)
        for layer in self.layers:
            for name, states in layer.held.items():
                alike[states.shape, states.dtype, states.device].append((layer.held, name))

        for places in alike.values():
            for first in range(0, len(places), NUM_TOGETHER):
                self._join(places[first : first + NUM_TOGETHER])
        for layer in self.layers:
            layer.see()

    def _join(self, places: Sequence[tuple[dict[str, Tensor], str]]) -> None:
        held, name = places[0]
        num_heads = held[name].shape[1]
        joined = room(held[name], num_heads * len(places), self.capacity)
        for (held, name), part in zip(places, joined.split(num_heads, dim=1), strict=True):
            held[name] = part.copy_(held[name])
        self._joined.append(joined)

    @property
    def capacity(self) -> int:
        """The slots that there are."""
        return self.view.capacity

    def see(self, num_slots: int) -> None:
        """Let the next forwards see the first slots alone."""
        if num_slots != self.view.num_shown:
            self.view.num_shown = num_slots
            for layer in self.layers:
                layer.see()

    def show(self, num_nodes: int, num_shown: int) -> None:
        """Prepare a forward of `num_nodes` nodes behind each row's text, which sees the first `num_shown` slots."""
        self.see(min(num_shown, self.capacity))
        steps = torch.arange(num_nodes, device=self.lengths.device)
        self.view.write_to((self.lengths + steps).clamp(max=self.view.num_shown - 1))

    def grow(self, capacity: int) -> None:
        """Make room for more slots, layer by layer, so that only one layer at a time is held twice.

        Without memory for it all layers hold what they held.
        """
        before, was_joined = self.capacity, bool(self._joined)
        self.view.capacity = self.view.num_shown = capacity
        self._joined = []
        try:
            for layer in self.layers:
                layer.grow()
            if was_joined:
                self.join()
        except torch.OutOfMemoryError:
            self._joined = []
            self.view.capacity = self.view.num_shown = before
            for layer in self.layers:
                layer.held = {name: states[:, :, :before] for name, states in layer.held.items()}
                layer.see()
            raise

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.lengths = self.lengths[rows]
        self._joined = []
        for layer in self.layers:
            layer.select(rows)

    def clear(self) -> None:
        """Overwrite everything that is held: an earlier text may have overflowed, and 0 times NaN is NaN."""
        for states in self.states:
            states.zero_()

    def free(self) -> None:
        """Free everything that is held, once nobody reads it."""
        self._joined = []
        for layer in self.layers:
            layer.free()

    def forget(self, slots: Tensor) -> None:
        """Overwrite what stands in `slots` `[rows, num]`: masked states must be finite, as 0 times NaN is NaN."""
        for states in self.states:
            states.scatter_(2, spread(slots, states), 0.0)

    def behind(self, num: int) -> list[Tensor]:
        """What stands in so many slots behind each text, layer by layer; the host is asked where they end."""
        found = []
        for row, length in enumerate(self.lengths[:, 0].tolist()):
            for layer in self.layers:
                found += [states[row, :, length : length + num] for states in layer.held.values()]
        return found

    def keep(self, path: Tensor, num_kept: Tensor) -> None:
        """Keep the nodes `path` `[rows, depths]` of the last forward, of each row the first `num_kept` `[rows, 1]`."""
        steps = torch.arange(path.shape[1], device=path.device)
        if path.shape[1] > 1:
            targets = (self.lengths + steps).clamp(max=self.capacity - 1)
            kept = (self.lengths + path).clamp(max=self.capacity - 1)
            sources = torch.where(steps < num_kept, kept, targets)  # what is not kept stays where it is
            for states in self.states:
                move(states, sources, targets)
        self.lengths.add_(num_kept)


@torch.inference_mode(False)  # a later call may write to it outside of that
def room(states: Tensor, num_heads: int, capacity: int) -> Tensor:
    """Zeros `[rows, num_heads, capacity, size]` for states `[rows, any, any, size]`."""
    shape = (states.shape[0], num_heads, capacity + SPARE_SLOTS, states.shape[3])
    return states.new_zeros(shape)[:, :, :-SPARE_SLOTS]


def move(states: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy what stands in slots `sources` `[rows, num]` of states `[rows, heads, slots, size]` to `targets`."""
    if len(sources) == 1:
        index = sources[0].to(states.device)
        states.index_copy_(2, targets[0].to(states.device), states.index_select(2, index))
    else:
        shape = states[:, :, : sources.shape[1]]
        states.scatter_(2, spread(targets, shape), states.gather(2, spread(sources, shape)))


def spread(slots: Tensor, states: Tensor) -> Tensor:
    """`[rows, slots]` repeated over the heads and entries of states `[rows, ..., any, size]`."""
    index = slots.to(states.device).reshape(len(slots), *[1] * (states.dim() - 3), -1, 1)
    return index.expand(*states.shape[:-2], -1, states.shape[-1])


@dataclass(frozen=True)
class Shapes:
    """The slots of all that is read at once."""

    is_exact: bool
    least_slots: int

    def slots(self, num: int) -> int:
        """The slots that attention sees if it must see `num`: a multiple of `least_slots`, or that doubled."""
        if self.is_exact:
            return -(-num // self.least_slots) * self.least_slots

        slots = self.least_slots
        while slots < num:
            slots *= 2
        return slots


EXACT = Shapes(is_exact=True, least_slots=64)
BUCKETS = Shapes(is_exact=False, least_slots=256)


def bucket(size: int, buckets: Sequence[int]) -> int:
    """The least of the ascending buckets that holds so many."""
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise GenerationError(
        f"A captured draft must have at most {buckets[-1]} nodes, and its tree that depth, but there are "
        f"{size}. Let the drafter keep to `budget.num_nodes`, or set `drafter.generation_config.capture = False`."
    )
