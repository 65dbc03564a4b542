"""A cache of Transformers: the one that read a prompt, before its text moves to slots or where it stays.

A text that stays has the columns of plain decoding. One row keeps any path of a draft, also where every path was read
as a row ([`PathBatch`]). Several rows keep in step, one token at a time; a row that has ended leaves holes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    StaticLayer,
)

from ..core.verification import TokenTree
from ..errors import GenerationError, TargetError
from ..transformers_versions import CACHE
from .slot_cache import spread

HOLE = -1  # the position of a slot that holds padding or a dropped token
ENDLESS = 2**31  # more tokens than any text has
_SLOT_AXIS = -2  # of the states of a layer, behind rows and before their entries
_LEAST_DIMS = 3


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


class RecordingWindow(LinearAttentionAndSlidingWindowAttentionLayer):
    """A layer of recurrent states and a window, of which the window alone keeps what it would drop."""

    def update(self, *states: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values behind those that are held."""
        self.record_past = True
        found = super().update(*states, **options)
        self.record_past = False
        return found

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the slots read last, and what has left the window."""
        self.record_past = True
        DynamicSlidingWindowLayer.crop(self, tokens_to_remove)
        self.record_past = False


def record(cache: Any) -> None:
    """Let sliding layers keep what they would drop until the next crop; recurrent states cannot be cropped."""
    cache.activate_past_recording()
    for layer in filter(is_recurrent, cache.layers):
        layer.record_past = False
        if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            layer.__class__ = RecordingWindow


def stop_recording(cache: Cache) -> None:
    """Let sliding layers drop at once what leaves their window, as before [`prepared`]."""
    for layer in _recording_layers(cache):
        if num_held(layer):
            layer.crop(0)
        layer.record_past = False
        if isinstance(layer, RecordingWindow):
            layer.__class__ = LinearAttentionAndSlidingWindowAttentionLayer  # type: ignore[assignment]  # as it was


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """The tensors that a layer keeps, by name; single numbers are none."""
    found = {}
    for name, value in vars(layer).items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0:
            found[name] = value
    return found


def num_tokens(cache: Any, otherwise: int = 0) -> int:
    """The tokens that a cache holds, or `otherwise` where none of its layers counts them, as all are recurrent."""
    counts = any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)
    return int(cache.get_seq_length()) if counts else otherwise


def num_held(layer: Any) -> int:
    """The number of slots that a layer holds; 0 before its first forward, or if it shares those of another layer."""
    keys = getattr(layer, "keys", None)
    return keys.shape[-2] if isinstance(keys, Tensor) and keys.numel() else 0


def check_holds_text(cache: Any, num_tokens: int, name: str) -> None:
    """Refuse a model of this name whose layers hold something else than the text: [`GenerationError`]."""
    for index, layer in enumerate(cache.layers):
        if num_held(layer) not in {0, num_tokens} and not is_sliding(layer):
            raise GenerationError(
                f"The cache of `{name}` must hold the text alone, but its layer {index} has {num_held(layer)} slots "
                f"after {num_tokens} tokens, as where layers attend to images. Generate without `assistant_model`."
            )


def drop_last(cache: Cache, num_slots: int) -> None:
    """Forget the slots read last; sliding layers shrink back to their window even if there are none to forget."""
    if num_slots:
        for each in cache.layers:
            _crop(each, num_slots)
        return
    for layer in _recording_layers(cache):
        layer.crop(0)


def _crop(layer: Any, num_slots: int) -> None:
    if not is_recurrent(layer) or isinstance(layer, RecordingWindow):
        layer.crop(-num_slots)
        return
    attention: Any = super(LinearAttentionCacheLayerMixin, layer)  # of a layer that is both
    if hasattr(attention, "crop"):
        attention.crop(-num_slots)


def is_recurrent(layer: Any) -> bool:
    """Whether a layer keeps a state that cannot be cropped."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def empty_layer(layer: Any) -> None:
    """Free the states of a layer."""
    for name, states in tensors_of(layer).items():
        axis = states.dim() - 2  # of its slots
        setattr(layer, name, states.narrow(axis, 0, 0).clone())


def _recording_layers(cache: Cache) -> list[Any]:
    return [
        layer for layer in cache.layers if getattr(layer, "record_past", False) or isinstance(layer, RecordingWindow)
    ]


def is_sliding(layer: Any) -> bool:
    """Whether a layer keeps a window of the text alone."""
    return bool(getattr(layer, "is_sliding", False))


def why_slots_stay(cache: Any) -> str | None:
    """Why slots cannot be moved: some layer keeps tensors that do not follow its slots; None if they can."""
    for layer in cache.layers:
        unknown = sorted(tensors_of(layer).keys() - _states_of(layer).keys())
        if unknown:
            return f"a `{type(layer).__name__}` of the cache keeps {unknown} besides its states"
    return None


def _states_of(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer that hold something of each slot: as many rows and slots as its keys, on their axes."""
    num_slots = num_held(layer)
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
        self._has_holes = bool((positions == HOLE).any())  # so that no read of a chain asks the device

    def __len__(self) -> int:
        """Slots, holes included."""
        return self.positions.shape[1]

    @property
    def is_held(self) -> Tensor:
        """Which slots hold a token: `[rows, slots]`."""
        return self.positions != HOLE

    @property
    def of_columns(self) -> Tensor:
        """The slot of each column `[rows, columns]` in a text of its own, without padding; -1 where there is none."""
        return (self.is_held.cumsum(-1) - 1).where(self.is_held, HOLE)

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
                self._has_holes |= longest > 0

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


@dataclass(frozen=True, eq=False)
class PathBatch:
    """The paths of a one-row tree as the rows of a batch, in which shorter paths repeat their last node."""

    paths: list[tuple[int, ...]]  # the nodes of each path, root first
    nodes: Tensor  # [paths, longest] the node at each depth
    rows_and_depths: Tensor  # [2, nodes] for each node a path that holds it, and its depth

    @staticmethod
    @lru_cache(maxsize=64)
    def of(parents: tuple[int, ...], device: torch.device) -> "PathBatch":
        """The batch of all paths of a tree; filler nodes are left out."""
        tree = TokenTree(parents, ())
        paths = []
        for node, parent in enumerate(parents):
            is_filler = node > 0 and parent < 0
            if node not in parents and not is_filler:
                paths.append(tree.path_to(node))

        longest = max(map(len, paths))
        nodes = torch.tensor([[*path, *[path[-1]] * (longest - len(path))] for path in paths], device=device)
        rows_and_depths = torch.zeros(2, len(parents), dtype=torch.long)  # fillers belong to nobody
        for row, path in enumerate(paths):
            rows_and_depths[:, list(path)] = torch.stack([torch.full((len(path),), row), torch.arange(len(path))])
        return PathBatch(paths, nodes, rows_and_depths.to(device))

    @property
    def longest(self) -> int:
        """Nodes of the longest path."""
        return self.nodes.shape[1]

    def by_node(self, states: Tensor) -> Tensor:
        """Turn states of the batch `[paths, longest, ...]` into states of the nodes `[1, nodes, ...]`."""
        rows, depths = self.rows_and_depths.to(states.device)
        return states[rows, depths][None]

    def row_of(self, path: Sequence[int]) -> int:
        """A row that begins with `path`."""
        return next(row for row, nodes in enumerate(self.paths) if nodes[: len(path)] == tuple(path))
