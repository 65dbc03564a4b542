"""The texts of a call in slots: each row's in the first ones, without padding or holes, whatever the others keep.

After the prefill the keys and values of Transformers' own cache move here, and back when the call has ended if
anybody gets that cache. Row `r` stands in slots `0 .. num_tokens[r] - 1`; the nodes that are read next stand behind
it. A layer with a window forgets what no node sees any more: a row's slots then begin behind what it has dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from . import cache as cache_file
from .cache import HOLE, is_sliding

ROOM = 256  # slots behind a prompt before its cache grows
GROWTH = 1.5  # times the slots that are needed, when it grows
_KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
_KNOWN_STATES = {"keys", "values", "indexer_keys"}
_NUM_DIMS = 4  # rows, heads, slots, size


def why_no_slots(cache: Any) -> str | None:
    """Why the text in a cache of Transformers cannot move to slots, in words; None if it can."""
    if getattr(cache, "offloading", False):
        return "the cache is offloaded"
    keep_nothing = getattr(cache, "is_dummy", [False] * len(cache.layers))  # which older versions have not
    for layer, keeps_nothing in zip(cache.layers, keep_nothing, strict=True):
        if type(layer) not in _KNOWN_LAYERS and not keeps_nothing:
            return f"layers of the target keep their states in a `{type(layer).__name__}`"

        unknown = sorted(cache_file.tensors_of(layer).keys() - _KNOWN_STATES)
        if unknown:
            return f"a `{type(layer).__name__}` of the cache keeps {unknown} besides its states"
    return None


class SlotView:
    """What layers of one kind hold, and what the next forward writes and sees there."""

    def __init__(self, num_rows: int, window: int | None) -> None:
        self.window = window
        self.capacity = 0
        self.num_dropped = [0] * num_rows  # tokens in front of a row's first slot
        self.num_shown = 0  # slots that attention sees
        self.first = 0  # the slot of the first node, in the longest text
        self.slots: Tensor | None = None  # [rows, nodes] where it is another one in some rows
        self.rows: Tensor | None = None  # of which the next forward is; None: of all
        self.num_held = 0  # tokens in front of the nodes, as a model may ask
        self.turn = 0  # number of the forward

    def lengths(self, num_tokens: Sequence[int]) -> list[int]:
        """The slots that each row's text fills."""
        return [num - dropped for num, dropped in zip(num_tokens, self.num_dropped, strict=True)]


class TextLayer(DynamicLayer):
    """What one layer keeps of the texts, by name; nothing if it shares the states of another layer.

    States are `[rows, heads, capacity, size]`; an indexer's, which have no heads in Transformers, have one here.
    """

    def __init__(self, view: SlotView) -> None:
        super().__init__()
        self.view = view
        self.held: dict[str, Tensor] = {}
        self.is_sliding = view.window is not None
        self._num_read, self._turn = 0, 0  # nodes of the newest forward that came here, and its number

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write states `[rows, heads, nodes, size]` behind the text; returns those of all slots that are shown."""
        self._num_read, self._turn = key_states.shape[2], self.view.turn
        return self._write("keys", key_states), self._write("values", value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """The same of an indexer's keys `[rows, nodes, size]`."""
        return self._write("indexer_keys", indexer_key_states[:, None])[:, 0]

    def _write(self, name: str, new: Tensor) -> Tensor:
        view, states = self.view, self.held[name]
        if view.slots is not None:
            states.scatter_(2, _spread(view.slots, new), new)
        elif view.rows is None:
            states.narrow(2, view.first, new.shape[2]).copy_(new)
        else:
            states[view.rows.to(states.device), :, view.first : view.first + new.shape[2]] = new

        shown = states.narrow(2, 0, view.num_shown)
        return shown if view.rows is None else shown[view.rows.to(states.device)]

    def get_seq_length(self) -> int:
        """The tokens of the longest text that is read, and the nodes once they are written."""
        return self.view.num_held + (self._num_read if self._turn == self.view.turn else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The slots that are shown, and the position of the first of them."""
        num_dropped = self.view.num_held - self.view.first
        return self.view.first + query_length, num_dropped

    def hold(self, name: str, states: Tensor) -> None:
        """Make room for states like these `[rows, heads, any, size]`, as much as the view says."""
        rows, heads, _, size = states.shape
        self.held[name] = states.new_zeros(rows, heads, self.view.capacity, size)
        self.is_initialized = True

    def grow(self) -> None:
        """Make room for the capacity of the view; what is held stays."""
        for name, states in list(self.held.items()):
            self.hold(name, states)
            self.held[name][:, :, : states.shape[2]].copy_(states)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the states in slots `sources` `[rows, num]` to `targets`, all at once."""
        for states in self.held.values():
            if len(sources) == 1:
                index = sources[0].to(states.device)
                states.index_copy_(2, targets[0].to(states.device), states.index_select(2, index))
            else:
                shape = states[:, :, : sources.shape[1]]
                states.scatter_(2, _spread(targets, shape), states.gather(2, _spread(sources, shape)))


@dataclass
class _Aside:
    """Rows that have left, and what is held of them."""

    numbers: list[int]
    num_tokens: list[int]
    num_dropped: list[list[int]]  # by view
    held: list[dict[str, Tensor]]  # by layer, and there by name


class TextCache(Cache):
    """The keys and values of the texts of one call."""

    layers: list[Any]

    def __init__(self, cache: Cache, columns: Tensor, max_length: int) -> None:
        """Take over what `cache` holds, layer by layer, so that no more than one is held twice.

        `columns` `[rows, columns]` names the slot of each column, -1 for padding.
        """
        self.device = columns.device
        is_held = columns != HOLE
        self.num_tokens: list[int] = is_held.sum(-1).tolist()
        self._numbers, self._aside = list(range(len(columns))), list[_Aside]()
        self._most = max_length
        self._num_new = 0  # nodes that were read last
        self._has_spoilt = False  # some of them are no finite numbers

        stock: list[Any] = cache.layers
        windows = [layer.sliding_window if is_sliding(layer) else None for layer in stock]
        views = {window: SlotView(len(columns), window) for window in windows}
        self.views = list(views.values())
        super().__init__(layers=[TextLayer(views[window]) for window in windows])

        for view in self.views:
            if view.window is not None:
                view.num_dropped = [max(num - view.window + 1, 0) for num in self.num_tokens]
            view.capacity = max(view.lengths(self.num_tokens)) + ROOM
        places = columns.tolist()
        copies: dict[tuple[SlotView, int], list[Copy]] = {}
        for mine, layer in zip(self.layers, stock, strict=True):
            num_held = cache_file.num_held_by(layer)
            if num_held == 0:
                continue  # it shares the states of another layer
            key = (mine.view, num_held)
            if key not in copies:
                copies[key] = copies_of(places, num_held, mine.view.num_dropped)
            for name, old in cache_file.tensors_of(layer).items():
                by_head = old if old.dim() == _NUM_DIMS else old[:, None]
                mine.hold(name, by_head)
                for row, taken, first, num in copies[key]:
                    mine.held[name][row, :, first : first + num].copy_(by_head[row, :, taken])
            cache_file.empty_layer(layer)

    @property
    def longest(self) -> int:
        """The tokens of the longest text."""
        return max(self.num_tokens)

    def num_dropped(self, window: int | None) -> list[int]:
        """The tokens of each row that layers with this window do not hold any more."""
        return next((view.num_dropped for view in self.views if view.window == window), [0] * len(self.num_tokens))

    @property
    def groups(self) -> list[list[int]]:
        """The rows whose texts end in the same slots, so that no mask is needed to read behind them together."""
        by_slots: dict[tuple[int, ...], list[int]] = {}
        for row, num in enumerate(self.num_tokens):
            dropped = (view.num_dropped[row] for view in self.views)
            by_slots.setdefault((num, *dropped), []).append(row)
        return list(by_slots.values())

    def begin(self, num_nodes: int, rows: Sequence[int] | None = None) -> None:
        """Prepare a forward of so many nodes behind each text, or those of some rows alone, which have one length."""
        self._num_new = num_nodes
        for view in self.views:
            lengths = view.lengths(self.num_tokens)
            if max(lengths) + num_nodes > view.capacity:
                self._make_room(view, num_nodes)
                lengths = view.lengths(self.num_tokens)
            if rows is not None:
                lengths = [lengths[row] for row in rows]

            view.turn += 1
            view.rows = None if rows is None else torch.tensor(rows, device=self.device)
            view.num_shown = max(lengths) + num_nodes
            view.num_held = max(self.num_tokens if rows is None else [self.num_tokens[rows[0]]])
            view.first, view.slots = max(lengths), None
            if min(lengths) != max(lengths):
                steps = torch.arange(num_nodes, device=self.device)
                view.slots = torch.tensor(lengths, device=self.device)[:, None] + steps

    def _make_room(self, view: SlotView, num_nodes: int) -> None:
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

    def _drop(self, view: SlotView, before: Sequence[int], kept: Sequence[int]) -> None:
        """Move the newest `kept` of each row's tokens to its first slots."""
        steps = torch.arange(max(kept), device=self.device)
        first = torch.tensor([num - left for num, left in zip(before, kept, strict=True)], device=self.device)
        sources = (first[:, None] + steps).clamp(max=view.capacity - 1)
        for layer in self._layers_of(view):
            layer.move(sources, steps.expand(len(kept), -1))
        for row, (num, left) in enumerate(zip(before, kept, strict=True)):
            view.num_dropped[row] += num - left

    def _layers_of(self, view: SlotView) -> list[TextLayer]:
        return [layer for layer in self.layers if layer.view is view and layer.held]

    def note_spoilt(self, logits: Tensor) -> None:
        """Look whether nodes that were read overflowed: a slot that is masked is still multiplied by 0."""
        self._has_spoilt = bool(logits[..., 0].isnan().any())

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's path of the nodes that were read last."""
        moved = [index for path in paths for index, node in enumerate(path) if node != index]
        if moved:
            first, longest = min(moved), max(map(len, paths))
            nodes = [[*path, *range(len(path), longest)][first:] for path in paths]  # what is not kept stays
            sources = torch.tensor(nodes, device=self.device)
            targets = torch.arange(first, longest, device=self.device)
            for view in self.views:
                lengths = torch.tensor(view.lengths(self.num_tokens), device=self.device)[:, None]
                for layer in self._layers_of(view):
                    layer.move(lengths + sources, lengths + targets)
        if self._has_spoilt:
            self._forget(paths)
        self.num_tokens = [num + len(path) for num, path in zip(self.num_tokens, paths, strict=True)]

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
        aside = _Aside(
            [self._numbers[row] for row in others],
            [self.num_tokens[row] for row in others],
            [[view.num_dropped[row] for row in others] for view in self.views],
            [],
        )
        for layer in self.layers:
            if keeps_others:
                aside.held.append({name: states[others] for name, states in layer.held.items()})
            for name, states in layer.held.items():
                layer.held[name] = states[list(rows)]
        self._aside += [aside] if keeps_others else []
        self._numbers = [self._numbers[row] for row in rows]
        self.num_tokens = [self.num_tokens[row] for row in rows]
        for view in self.views:
            view.num_dropped = [view.num_dropped[row] for row in rows]

    def write_back(self, cache: Cache, padding: Sequence[Sequence[int]]) -> list[int]:
        """Fill the cache that the texts came from, each text behind the columns of its padding; frees what is here.

        `padding` names the columns of each row that hold no token. Returns the tokens of every row.
        """
        num_tokens = dict(zip(self._numbers, self.num_tokens, strict=True))
        for aside in self._aside:
            num_tokens |= dict(zip(aside.numbers, aside.num_tokens, strict=True))
        lengths = [num_tokens[number] for number in range(len(padding))]
        num_columns = max(num + len(holes) for num, holes in zip(lengths, padding, strict=True))
        columns = []
        for num, holes in zip(lengths, padding, strict=True):
            free = [column for column in range(num_columns) if column not in set(holes)]
            columns.append(free[:num])

        for index, layer in enumerate(cache.layers):
            self._write_layer(index, layer, columns, num_columns)
        return lengths

    def _write_layer(self, index: int, layer: Any, columns: list[list[int]], num_columns: int) -> None:
        mine = self.layers[index]
        number = self.views.index(mine.view)
        parts = [(self._numbers, mine.view.num_dropped, mine.held)]
        parts += [(aside.numbers, aside.num_dropped[number], aside.held[index]) for aside in self._aside]

        for name, states in mine.held.items():
            whole = states.new_zeros(len(columns), states.shape[1], num_columns, states.shape[3])
            for numbers, dropped, held in parts:
                for row, (own, num_dropped) in enumerate(zip(numbers, dropped, strict=True)):
                    places = columns[own][num_dropped:]
                    whole[own, :, slice_of(places)] = held[name][row, :, : len(places)]
            has_heads = getattr(layer, name).dim() == _NUM_DIMS
            setattr(layer, name, whole if has_heads else whole[:, 0])

        if mine.held and is_sliding(layer):
            layer.cumulative_length = num_columns
            layer.crop(0)
        mine.held = {}


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


def _spread(slots: Tensor, states: Tensor) -> Tensor:
    """`[rows, num]` for every head and entry of states `[rows, heads, num, size]`."""
    return slots.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
