"""The slots of a cache that several rows share: accepted paths are kept, rows realigned, and some selected."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import TargetError
from .cache import HOLE, drop_last, is_sliding, spread

MAX_WASTE = 0.25  # share of slots that realigning must save to be worth reading and writing the cache once
_SLOT_AXIS = -2  # of the states of a layer, behind rows and before their entries
_LEAST_DIMS = 3


def why_rows_stay(cache: Any) -> str | None:
    """Why the rows of a cache cannot be selected, in words; None if they can."""
    if getattr(cache, "offloading", False):
        return "the cache is offloaded"
    return why_slots_stay(cache)


def why_slots_stay(cache: Any) -> str | None:
    """Why slots cannot be moved: some layer keeps tensors that do not follow its slots; None if they can."""
    for layer in cache.layers:
        tensors = {name for name, value in vars(layer).items() if isinstance(value, Tensor) and value.numel()}
        unknown = sorted(name for name in tensors - set(_names_of_states(layer)) if vars(layer)[name].dim())
        if unknown:
            return f"a `{type(layer).__name__}` of the cache keeps {unknown} besides its states"
    return None


def _names_of_states(layer: Any) -> list[str]:
    """The tensors of a layer that hold something of each slot: as many rows and slots as its keys, on their axes."""
    keys = getattr(layer, "keys", None)
    if not isinstance(keys, Tensor) or not keys.numel():
        return []
    num_rows, num_slots = keys.shape[0], keys.shape[_SLOT_AXIS]
    found = []
    for name, value in vars(layer).items():
        if not isinstance(value, Tensor) or value.dim() < _LEAST_DIMS or not value.numel():
            continue
        if value.shape[0] == num_rows and value.shape[_SLOT_AXIS] == num_slots:
            found.append(name)
    return found


class _Aside(NamedTuple):
    """Rows of a cache that are not read any more."""

    numbers: list[int]
    positions: Tensor  # [rows, slots]
    states: list[Tensor]  # [rows, ..., slots, size], in the order of `RowSlots._states`


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
        self._numbers, self._aside = list(range(len(positions))), list[_Aside]()

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

    def chain_mask(self, positions: Tensor) -> Tensor | None:
        """The 2-D mask of the text and of tokens behind it; None where every slot holds a token."""
        return (torch.cat([self.positions, positions], dim=-1) != HOLE).long() if self.has_holes else None

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
            reason = why_slots_stay(self.cache)
            if reason is not None:
                raise TargetError(f"The tokens of a tree cannot be moved to their places: {reason}.")
            for _layer, _name, states in self._states():
                first = states.shape[-2] - num_nodes
                new = states.gather(-2, spread(chosen[:, min(moved) :] + first, states))
                states.narrow(-2, first + min(moved), new.shape[-2]).copy_(new)
        start = len(self) - num_nodes
        positions = self.positions[:, start:].gather(1, chosen)
        if min(map(len, paths)) < longest:
            positions = positions.masked_fill(kept == HOLE, HOLE)
            self.is_shifted = self.is_ragged = True
        self.positions = torch.cat([self.positions[:, :start], positions], dim=-1)
        drop_last(self.cache, num_nodes - longest)
        self.num_tokens = [num - num_nodes + len(path) for num, path in zip(self.num_tokens, paths, strict=True)]

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

    def select(self, rows: Sequence[int], keeps_others: bool = False) -> None:
        """Hold these rows alone, in the slots that they need; `keeps_others` for [`RowSlots.with_all_rows`]."""
        others = [row for row in range(len(self.positions)) if row not in rows]
        aside = _Aside([self._numbers[row] for row in others], self.positions[others], [])
        for layer, name, states in self._states():
            if keeps_others:
                aside.states.append(states[others])
            setattr(layer, name, states[list(rows)])
        self._aside += [aside] if keeps_others else []
        self._numbers, self.positions = [self._numbers[row] for row in rows], self.positions[list(rows)]
        self.num_tokens, self._num_gaps = ([each[row] for row in rows] for each in (self.num_tokens, self._num_gaps))
        if len(self) > self._num_needed:
            self._realign()

    def with_all_rows(self) -> "RowSlots":
        """The slots of all rows, those that were kept aside in their places again."""
        if not self._aside:
            return self
        numbers = [*self._numbers, *(number for part in self._aside for number in part.numbers)]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        for index, (layer, name, states) in enumerate(self._states()):
            parts = [states, *(part.states[index] for part in self._aside)]
            setattr(layer, name, _below_each_other(parts, 0.0)[order])
        held = [self.positions, *(part.positions for part in self._aside)]
        positions = _below_each_other([part[..., None] for part in held], HOLE)[order, :, 0]
        slots = RowSlots(self.cache, positions)
        slots.is_shifted = slots.is_ragged = True
        return slots

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
            setattr(layer, name, states.gather(-2, spread(sources, states)))
        for layer in filter(is_sliding, self.cache.layers):
            layer.cumulative_length = num_slots

    def _states(self) -> Iterator[tuple[Any, str, Tensor]]:
        """All states of all layers, with where they are kept; one by one, so that those replaced are freed."""
        names_by_layer = [_names_of_states(layer) for layer in self.cache.layers]
        for index, layer in enumerate(self.cache.layers):
            for name in names_by_layer[index]:
                yield layer, name, getattr(layer, name)


def _below_each_other(parts: Sequence[Tensor], filler: float) -> Tensor:
    """Rows `[rows, ..., slots, size]` of several parts, with as many slots."""
    most = max(part.shape[-2] for part in parts)
    return torch.cat([functional.pad(part, (0, 0, 0, most - part.shape[-2]), value=filler) for part in parts])
