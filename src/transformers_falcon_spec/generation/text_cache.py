"""The texts of a call in slots: each row's in the first ones, without padding or holes, whatever the others keep.

After the prefill the keys and values of Transformers' own cache move here, and back when the call has ended if
anybody gets that cache. Row `r` stands in slots `0 .. num_tokens[r] - 1`; the nodes that are read next stand behind
it. A layer with a window forgets what no node sees any more: a row's slots then begin behind what it has dropped.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from operator import add, sub
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from . import stock_cache
from .recurrent import States, put_states, states_of
from .slot_cache import SlotCache, SlotLayer, SlotView
from .stock_cache import HOLE, is_recurrent, is_sliding

ROOM = 256  # slots behind a prompt before its cache grows
GROWTH = 1.5  # times the slots that are needed, when it grows
_KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    stock_cache.RecordingWindow,
)
_KNOWN_STATES = {"keys", "values", "indexer_keys"}
_NUM_DIMS = 4  # rows, heads, slots, size


def why_no_slots(cache: Any) -> str | None:
    """Why the text in a cache of Transformers cannot move to slots, in words; None if it can."""
    if getattr(cache, "offloading", False):
        return "the cache is offloaded"
    if type(cache).update is not DynamicCache.update or "update" in vars(cache):
        return f"the `{type(cache).__name__}` has an `update` of its own"

    keep_nothing = getattr(cache, "is_dummy", [False] * len(cache.layers))  # which older versions have not
    for layer, keeps_nothing in zip(cache.layers, keep_nothing, strict=True):
        if type(layer) not in _KNOWN_LAYERS and not keeps_nothing:
            return f"layers of the target keep their states in a `{type(layer).__name__}`"

        unknown = sorted(stock_cache.tensors_of(layer).keys() - _KNOWN_STATES)
        if unknown:
            return f"a `{type(layer).__name__}` of the cache keeps {unknown} besides its states"

    return None


class TextView(SlotView):
    """A view of layers with one window, which forget what no node sees any more."""

    num_held: int = 0
    num_hidden: int = 0  # slots in front of those that are shown: what has left the window of a token read alone

    def __init__(self, num_rows: int, window: int | None) -> None:
        super().__init__(num_rows)
        self.window = window

    def lengths(self, num_tokens: Sequence[int]) -> list[int]:
        """The slots that each row's text fills."""
        return list(map(sub, num_tokens, self.num_dropped))

    def shown(self, states: Tensor) -> Tensor:
        """The slots that are shown, as a view of PyTorch: that takes less time, and nothing here is compiled."""
        return states.narrow(2, self.num_hidden, self.num_shown)


class RecurrentLayer(LinearAttentionLayer, SlotLayer):  # type: ignore[misc, override]  # of which SlotLayer decides
    """A layer of recurrent states, and of keys and values in slots where it attends, too."""

    def __init__(self, view: SlotView, window: int | None, stock: Any) -> None:
        SlotLayer.__init__(self, view, window)
        LinearAttentionLayer.__init__(self, stock.number_of_states)
        for name in vars(LinearAttentionLayer()):
            setattr(self, name, copy(getattr(stock, name)))

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        SlotLayer.select(self, rows)
        put_states(self, {key: state[list(rows)] for key, state in states_of(self).items()})


@dataclass
class Part:
    """Some rows of one layer: their numbers, the tokens of each that it has dropped, and what it holds of them."""

    numbers: Sequence[int]
    num_dropped: Sequence[int]
    held: dict[str, Tensor]
    states: States  # recurrent ones


class TextCache(Cache):
    """The keys and values of the texts of one call."""

    layers: list[Any]

    def __init__(
        self, windows: Sequence[int | None], num_tokens: Sequence[int], device: torch.device, max_length: int
    ) -> None:
        """One layer for each of `windows`, without states."""
        self.device = device
        self.num_tokens = list(num_tokens)
        self._numbers = list(range(len(num_tokens)))
        self._num_tokens_aside: dict[int, int] = {}  # of rows that have left, by number
        self._aside: list[list[Part]] = [[] for _ in windows]  # what is held of them, by layer
        self._most = max_length
        self._num_new = 0  # nodes that were read last
        self._has_spoilt = False  # some of them are no finite numbers

        views = {window: TextView(len(num_tokens), window) for window in windows}
        self.views = list(views.values())
        super().__init__(layers=[SlotLayer(views[window], window) for window in windows])

    @classmethod
    def moved(cls, cache: Cache, columns: Tensor, max_length: int) -> "TextCache":
        """Take over what a cache of Transformers holds; `columns` `[rows, columns]` are the slots of its columns.

        The slot of padding is -1.
        """
        stock: list[Any] = cache.layers
        windows = [layer.sliding_window if is_sliding(layer) else None for layer in stock]
        text = cls(windows, (columns != HOLE).sum(-1).tolist(), columns.device, max_length)

        for view in text.views:
            if view.window is not None:
                view.num_dropped = [max(num - view.window + 1, 0) for num in text.num_tokens]
            view.capacity = max(view.lengths(text.num_tokens)) + ROOM

        for index, (layer, window) in enumerate(zip(stock, windows, strict=True)):
            if is_recurrent(layer):
                text.layers[index] = RecurrentLayer(text.layers[index].view, window, layer)

        fill(text.layers, cache, columns)
        return text

    @classmethod
    def of_slots(cls, slots: SlotCache, num_tokens: Sequence[int], max_length: int) -> "TextCache":
        """Go on with what stands in slots already."""
        text = cls([None] * len(slots.layers), num_tokens, slots.lengths.device, max_length)
        for view in text.views:
            view.capacity = slots.capacity
        for index, layer in enumerate(slots.layers):
            if is_recurrent(layer):
                text.layers[index] = RecurrentLayer(text.layers[index].view, None, layer)
            text.layers[index].held = layer.held
        return text

    def num_dropped(self, window: int | None) -> list[int]:
        """The tokens of each row that layers with this window do not show any more."""
        for view in self.views:
            if view.window == window:
                return [num + view.num_hidden for num in view.num_dropped]
        return [0] * len(self.num_tokens)

    @property
    def groups(self) -> list[list[int]]:
        """The rows whose texts end in the same slots, so that no mask is needed to read behind them together."""
        by_slots: dict[tuple[int, ...], list[int]] = {}
        for row, num in enumerate(self.num_tokens):
            dropped = (view.num_dropped[row] for view in self.views)
            by_slots.setdefault((num, *dropped), []).append(row)
        return list(by_slots.values())

    def begin(self, num_nodes: int, rows: Sequence[int] | None = None, has_mask: bool = True) -> None:
        """Prepare a forward of so many nodes behind each text, or those of some rows alone, which have one length.

        A single node without a mask is shown its window alone: some models (Moshi) mask nothing themselves.
        """
        self._num_new = num_nodes
        is_alone = num_nodes == 1 and not has_mask

        for view in self.views:
            lengths = view.lengths(self.num_tokens)
            if max(lengths) + num_nodes > view.capacity:
                self._make_room(view, num_nodes)
                lengths = view.lengths(self.num_tokens)
            if rows is not None:
                lengths = [lengths[row] for row in rows]

            view.turn += 1
            view.rows = None if rows is None else torch.tensor(rows, device=self.device)
            view.num_hidden = max(max(lengths) + 1 - view.window, 0) if is_alone and view.window is not None else 0
            view.num_shown = max(lengths) + num_nodes - view.num_hidden
            view.num_held = max(self.num_tokens if rows is None else [self.num_tokens[rows[0]]])
            if min(lengths) == max(lengths):
                view.write_from(max(lengths) - view.num_hidden)
            else:
                steps = torch.arange(num_nodes, device=self.device)
                view.write_to(torch.tensor(lengths, device=self.device)[:, None] + steps)

        for layer in self.layers:
            layer.see()

    def _make_room(self, view: TextView, num_nodes: int) -> None:
        """Drop what a window has left behind, and grow if that is not enough."""
        if view.window is not None:
            before = view.lengths(self.num_tokens)
            kept = [min(num, view.window - 1) for num in before]
            if max(kept) < max(before):
                self._drop(view, before, kept)

        needed = max(view.lengths(self.num_tokens)) + num_nodes
        if needed + ROOM // 2 > view.capacity:
            view.capacity = max(needed + ROOM // 2, min(int(GROWTH * needed), self._most + ROOM))
            for layer in self._layers_of(view):
                layer.grow()

    def _drop(self, view: TextView, before: Sequence[int], kept: Sequence[int]) -> None:
        """Move the newest `kept` of each row's tokens to its first slots."""
        steps = torch.arange(max(kept), device=self.device)
        first = torch.tensor(list(map(sub, before, kept)), device=self.device)
        sources = (first[:, None] + steps).clamp(max=view.capacity - 1)
        for layer in self._layers_of(view):
            layer.move(sources, steps.expand(len(kept), -1))
        for row, (num, left) in enumerate(zip(before, kept, strict=True)):
            view.num_dropped[row] += num - left

    def _layers_of(self, view: TextView) -> list[SlotLayer]:
        return [layer for layer in self.layers if layer.view is view and layer.held]

    def note_spoilt(self, logits: Tensor) -> None:
        """Look whether nodes that were read overflowed: a slot that is masked is still multiplied by 0."""
        self._has_spoilt = bool(logits[..., 0].isnan().any())

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's path of the nodes that were read last."""
        order = list(range(max(map(len, paths))))
        nodes = []
        for path in paths:
            nodes.append([*path, *order[len(path) :]])  # what is not kept stays

        if nodes != [order] * len(nodes):
            sources = torch.tensor(nodes, device=self.device)
            targets = torch.tensor(order, device=self.device)
            for view in self.views:
                lengths = torch.tensor(view.lengths(self.num_tokens), device=self.device)[:, None]
                for layer in self.layers:
                    if layer.view is view:
                        layer.move(lengths + sources, lengths + targets)

        if self._has_spoilt:
            self._forget(paths)
        self.num_tokens = list(map(add, self.num_tokens, map(len, paths)))

    def _forget(self, paths: Sequence[Sequence[int]]) -> None:
        """Overwrite the nodes that are not kept."""
        for view in self.views:
            for row, (length, path) in enumerate(zip(view.lengths(self.num_tokens), paths, strict=True)):
                for layer in self._layers_of(view):
                    for states in layer.held.values():
                        states[row, :, length + len(path) : length + self._num_new] = 0
        self._has_spoilt = False

    def select(self, rows: Sequence[int], keeps_others: bool) -> None:
        """Go on with these rows alone; `keeps_others` for `write_back`."""
        others = [row for row in range(len(self.num_tokens)) if row not in rows]
        numbers = [self._numbers[row] for row in others]
        for row in others:
            self._num_tokens_aside[self._numbers[row]] = self.num_tokens[row]

        for layer, aside in zip(self.layers, self._aside, strict=True):
            if keeps_others:
                num_dropped = [layer.view.num_dropped[row] for row in others]
                held = {name: states[others] for name, states in layer.held.items()}
                states = {key: state[others] for key, state in states_of(layer).items()}
                aside.append(Part(numbers, num_dropped, held, states))

            layer.select(rows)

        self._numbers = [self._numbers[row] for row in rows]
        self.num_tokens = [self.num_tokens[row] for row in rows]
        for view in self.views:
            view.num_dropped = [view.num_dropped[row] for row in rows]

    def write_back(self, cache: Cache, padding: Sequence[Sequence[int]]) -> None:
        """Fill the cache that the texts came from, each text behind the columns of its padding; frees what is here.

        `padding` names the columns of each row that hold no token.
        """
        num_tokens = {**self._num_tokens_aside, **dict(zip(self._numbers, self.num_tokens, strict=True))}
        lengths = [num_tokens[number] for number in range(len(padding))]
        columns, num_columns = columns_of(lengths, padding)

        for mine, layer, aside in zip(self.layers, cache.layers, self._aside, strict=True):
            parts = [Part(self._numbers, mine.view.num_dropped, mine.held, states_of(mine)), *aside]
            write_layer(layer, columns, num_columns, parts)
            mine.free()


def fill(layers: Sequence[SlotLayer], cache: Cache, columns: Tensor) -> None:
    """Move what `cache` holds to slots, layer by layer, so that no more than one is held twice.

    Column `c` of a row goes to slot `columns[row, c]`, nowhere if that is -1. The host is asked once, which these are.
    """
    places = columns.tolist()
    copies: dict[tuple[SlotView, int], list[Copy]] = {}
    for mine, layer in zip(layers, cache.layers, strict=True):
        num_held = stock_cache.num_held(layer)
        if num_held == 0:
            continue  # it shares the states of another layer

        key = (mine.view, num_held)
        if key not in copies:
            copies[key] = copies_of(places, num_held, mine.view.num_dropped)
        _reserve(mine, layer)
        for name, old in _by_head(layer).items():
            for row, taken, first, num in copies[key]:
                mine.held[name][row, :, first : first + num].copy_(old[row, :, taken])

        stock_cache.empty_layer(layer)


def reserve(slots: SlotCache, cache: Cache) -> None:
    """Make room for all that [`fill`] will move, joined so that a path moves at once, and overwrite what is there."""
    for index, layer in enumerate(cache.layers):
        if is_recurrent(layer) and not is_recurrent(slots.layers[index]):
            slots.layers[index] = RecurrentLayer(slots.view, None, layer)
        _reserve(slots.layers[index], layer)
    slots.join()
    slots.clear()


def _reserve(mine: SlotLayer, layer: Any) -> None:
    for name, states in _by_head(layer).items():
        if name not in mine.held:
            mine.hold(name, states)


def _by_head(layer: Any) -> dict[str, Tensor]:
    """The states of a layer of Transformers as `[rows, heads, slots, size]`."""
    return {
        name: states if states.dim() == _NUM_DIMS else states[:, None]
        for name, states in stock_cache.tensors_of(layer).items()
    }


def columns_of(num_tokens: Sequence[int], padding: Sequence[Sequence[int]]) -> tuple[list[list[int]], int]:
    """The columns of each row's tokens in a cache where those of its `padding` hold none, and how many it has."""
    num_columns = max(num + len(holes) for num, holes in zip(num_tokens, padding, strict=True))
    columns = []
    for num, holes in zip(num_tokens, padding, strict=True):
        left_out = set(holes)
        free = [column for column in range(num_columns) if column not in left_out]
        columns.append(free[:num])
    return columns, num_columns


def write_layer(layer: Any, columns: Sequence[Sequence[int]], num_columns: int, parts: Sequence[Part]) -> None:
    """Fill a layer of Transformers with the texts of all rows, each in its columns, and their recurrent states."""
    for name, states in parts[0].held.items():
        whole = states.new_zeros(len(columns), states.shape[1], num_columns, states.shape[3])
        for part in parts:
            for row, (number, num_dropped) in enumerate(zip(part.numbers, part.num_dropped, strict=True)):
                places = columns[number][num_dropped:]
                whole[number, :, slice_of(places)] = part.held[name][row, :, : len(places)]

        has_heads = getattr(layer, name).dim() == _NUM_DIMS
        setattr(layer, name, whole if has_heads else whole[:, 0])

    for key, state in parts[0].states.items():
        whole = state.new_empty(len(columns), *state.shape[1:])
        for part in parts:
            whole[part.numbers] = part.states[key]
        put_states(layer, {key: whole})

    if parts[0].held and is_sliding(layer):
        layer.cumulative_length = num_columns
        layer.crop(0)


Copy = tuple[int, slice | list[int], int, int]  # a row, its columns, the slot of the first of them, and their number


def copies_of(columns: list[list[int]], num_held: int, num_dropped: Sequence[int]) -> list[Copy]:
    """What goes to slots from a layer that holds the newest `num_held` columns.

    `columns` names the slot of each, -1 for none; the first `num_dropped` slots of a row are left out.
    """
    num_missing = len(columns[0]) - num_held
    copies: list[Copy] = []
    for row, (places, first) in enumerate(zip(columns, num_dropped, strict=True)):
        taken = [column for column in range(num_missing, len(places)) if places[column] >= first]
        if taken:
            start = places[taken[0]] - first
            copies.append((row, slice_of([column - num_missing for column in taken]), start, len(taken)))
    return copies


def slice_of(places: Sequence[int]) -> slice | list[int]:
    """Places as a slice where they follow each other."""
    if not places or places[-1] - places[0] != len(places) - 1:
        return list(places)
    return slice(places[0], places[-1] + 1)
