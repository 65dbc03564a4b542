"""The slots of a text that stays in the cache of Transformers which read its prompt, in plain decoding's columns.

One row keeps any path of a draft. Several rows keep in step, one token at a time; a row that has ended leaves holes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import TargetError
from .cache import HOLE, drop_last, num_held_by, spread, tensors_of

_SLOT_AXIS = -2  # of the states of a layer, behind rows and before their entries
_LEAST_DIMS = 3


def why_slots_stay(cache: Any) -> str | None:
    """Why slots cannot be moved: some layer keeps tensors that do not follow its slots; None if they can."""
    for layer in cache.layers:
        unknown = sorted(tensors_of(layer).keys() - _states_of(layer).keys())
        if unknown:
            return f"a `{type(layer).__name__}` of the cache keeps {unknown} besides its states"
    return None


def _states_of(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer that hold something of each slot: as many rows and slots as its keys, on their axes."""
    num_slots = num_held_by(layer)
    if not num_slots:
        return {}
    found = {}
    for name, value in tensors_of(layer).items():
        follows = value.dim() >= _LEAST_DIMS and value.shape[_SLOT_AXIS] == num_slots
        if follows and len(value) == len(layer.keys):
            found[name] = value
    return found


class StockSlots:
    """Which token stands in each slot of a cache, and which slots hold none.

    `positions` `[rows, slots]` are -1 at padding, and where a row that had ended was read with the others.
    """

    def __init__(self, cache: Any, positions: Tensor) -> None:
        self.cache, self.positions = cache, positions
        self._has_holes = bool((positions == HOLE).any())  # known without asking the device again

    def __len__(self) -> int:
        """Slots, holes included."""
        return self.positions.shape[1]

    @property
    def is_held(self) -> Tensor:
        """Which slots hold a token: `[rows, slots]`."""
        return self.positions != HOLE

    @property
    def has_gaps(self) -> bool:
        """Whether padding stands behind a token."""
        return bool((~self.is_held & (self.is_held.cumsum(-1) > 0)).any())

    def mask_of_chain(self, num_nodes: int) -> Tensor | None:
        """The 2-D mask of the text and of tokens behind it; None where every slot holds a token."""
        if not self._has_holes:
            return None
        is_held = self.is_held
        return torch.cat([is_held, is_held.new_ones(len(is_held), num_nodes)], dim=-1).long()

    def keep(self, num_nodes: int, paths: Sequence[Sequence[int]]) -> None:
        """Of the `num_nodes` slots read last keep those of each row's path, in their order, and drop the rest."""
        longest = max(map(len, paths))
        if any(len(path) not in {0, longest} for path in paths):
            raise TargetError("Rows of a cache of Transformers keep in step, but some keep more tokens than others.")

        if any(list(path) != list(range(len(path))) for path in paths):
            self._move(num_nodes, paths[0])
        drop_last(self.cache, num_nodes - longest)

        new = torch.arange(len(self), len(self) + longest, device=self.positions.device).repeat(len(paths), 1)
        for row, path in enumerate(paths):
            if not path:
                new[row] = HOLE
                self._has_holes = self._has_holes or longest > 0
        self.positions = torch.cat([self.positions, new], dim=-1)

    def _move(self, num_nodes: int, path: Sequence[int]) -> None:
        """Move the nodes of the one row's path to the slots of the first nodes."""
        reason = why_slots_stay(self.cache)
        if reason is not None:
            raise TargetError(f"The tokens of a tree cannot be moved to their places: {reason}.")

        nodes = torch.tensor([path], device=self.positions.device)
        for layer in self.cache.layers:
            for states in _states_of(layer).values():
                first = states.shape[_SLOT_AXIS] - num_nodes
                kept = states.gather(_SLOT_AXIS, spread(nodes + first, states))
                states.narrow(_SLOT_AXIS, first, len(path)).copy_(kept)
