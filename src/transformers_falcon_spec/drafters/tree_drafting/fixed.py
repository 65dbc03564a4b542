"""What a drafter keeps of texts in buffers of fixed shape: pairs that wait, keys and values, drafts, and work on them.

The cache has slots for drafted tokens first, then one slot for what nobody reads, then those of the text. With a
sliding window these are a ring, in which new tokens take the place of those that no window reaches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core.masks import within_reach
from ...generation.cache import ENDLESS, HOLE
from ...generation.drafting import Kept
from ...generation.row_slots import RowSlots
from ...generation.static.graph import MemoryPool, RepeatedWork
from ...generation.static.slot_cache import SlotCache
from ...generation.static.state import shown_slots

LEAST_WAITING = 64  # pairs of a row that can wait for a drafter that is not asked
MOST_DRAFTS = 16  # shapes of drafts that are kept, each for one temperature
MULTIPLE = 8  # slots before the text: kernels of attention want masks so aligned


@dataclass(frozen=True)
class ReadPrompt:
    """What a generator has of the prompts, read as ever, when it goes on in fixed shapes."""

    slots: RowSlots
    num_read: Sequence[int]  # pairs of each row
    roots: Tensor  # [rows, 1]
    first: Tensor  # [rows, 1, k, hidden] features of the first pass of a draft
    pair: Tensor  # [pairs, feature_dim] any of the target's features
    carried: Mapping[str, Tensor]  # states of other kinds, each of a shape that does not depend on the text
    num_draft_slots: int  # most tokens that are fed to draft a tree
    most_kept: int  # of a step's tokens of a row, as a rule
    window: int | None = None  # newest tokens of the text that are seen
    settings: Any = None  # what else decides the work, besides weights and what drafts are asked for

    @property
    def shapes(self) -> Any:
        """What buffers depend on besides the length of texts."""
        tensors = {"roots": self.roots, "first": self.first, "pair": self.pair[:0], **self.carried}
        for number, layer in enumerate(self.slots.cache.layers):
            tensors |= {f"keys {number}": layer.keys[:, :, 0], f"values {number}": layer.values[:, :, 0]}
        shapes = {name: (states.shape, states.dtype, states.device) for name, states in tensors.items()}
        return shapes, self.num_draft_slots, self.most_kept, self.window, self.settings


@dataclass
class FixedDraft:
    """The buffers of drafts of one shape, and the work that fills them, by the slots that it sees."""

    token_ids: Tensor  # [rows, nodes]
    parents: Tensor  # [rows, nodes]
    constants: dict[Any, Any] = field(default_factory=dict)  # read by the work, so they must stay
    work: dict[int, RepeatedWork] = field(default_factory=dict)


class FixedPairs:
    """Buffers of a fixed number of rows; they outlive a call, so that another generator may go on in them.

    A row's pairs wait in its first columns. Nothing here holds drafter or target: work gets them when it runs.
    """

    def __init__(self, prompt: ReadPrompt, num_slots: int) -> None:
        num_rows, device = len(prompt.roots), prompt.roots.device
        self.made_for, self.most_kept = prompt.shapes, prompt.most_kept
        self.most_waiting = max(self.most_kept, LEAST_WAITING)
        self.num_before = -(-(prompt.num_draft_slots + 1) // MULTIPLE) * MULTIPLE  # slots before those of the text
        self.window, self.num_ring_slots = prompt.window, ENDLESS
        if self.window is not None:  # what waits is read at once, and sees a window each
            num_ring_slots = self.window + max(self.most_waiting, prompt.first.shape[2])
            self.num_ring_slots = -(-num_ring_slots // MULTIPLE) * MULTIPLE
        self.num_slots = min(num_slots, self.num_ring_slots)
        self.cache = SlotCache(len(prompt.slots.cache.layers), num_rows, self.num_before + self.num_slots, device)
        with torch.inference_mode(False):
            columns = self.most_waiting + 1  # the last one takes what does not count
            self.token_ids = torch.zeros(num_rows, columns, dtype=torch.long, device=device)
            self.features = torch.zeros(
                num_rows, columns, prompt.pair.shape[-1], dtype=prompt.pair.dtype, device=device
            )
            self.num_waiting, self.roots, self.limits = (torch.zeros_like(self.token_ids[:, :1]) for _ in range(3))
            self.first = torch.zeros_like(prompt.first)
            self.carried = {name: torch.zeros_like(states) for name, states in prompt.carried.items()}
        self._pool = MemoryPool()
        self._host_limits: tuple[int, ...] = ()
        self._adds: dict[Any, tuple[Kept, RepeatedWork]] = {}  # by where what is added lies
        self._reads: dict[tuple[int, int], RepeatedWork] = {}
        self._drafts: dict[Any, FixedDraft] = {}

    def load(self, prompt: ReadPrompt) -> None:
        """Begin with the prompts."""
        self.shown(max(prompt.num_read))
        if self.cache.layers:
            positions = prompt.slots.positions.to(self.roots.device)
            first = torch.tensor(prompt.num_read, device=positions.device)[:, None] - self.num_ring_slots
            slots = positions % self.num_ring_slots + self.num_before
            self.cache.fill(prompt.slots.cache.layers, slots.where(positions >= first.clamp(min=0), HOLE))
        self.cache.lengths.copy_(torch.tensor(prompt.num_read)[:, None])
        self.num_waiting.zero_()
        self.roots.copy_(prompt.roots)
        self.first.copy_(prompt.first)
        for name, states in prompt.carried.items():
            self.carried[name].copy_(states)

    def grow(self, num_slots: int) -> None:
        """Make room for a longer text; work is captured anew."""
        self._reads, self._drafts, self.num_slots = {}, {}, num_slots
        self.cache.grow(self.num_before + num_slots)

    @property
    def repeated(self) -> list[RepeatedWork]:
        """All work that is held."""
        drafts = [work for draft in self._drafts.values() for work in draft.work.values()]
        return [*(work for _, work in self._adds.values()), *self._reads.values(), *drafts]

    def add_kept(self, kept: Kept) -> None:
        """[`FixedPairs.add`] of what a step kept, in buffers that every such step writes anew."""
        assert kept.features is not None  # a drafter of this kind reads at least one layer
        parts = (kept.token_ids, kept.features, kept.num)
        key = tuple((part.data_ptr(), part.shape) for part in parts)
        if key not in self._adds:
            self._adds[key] = (kept, self._work((self.num_waiting, self.roots)))
        while len(self._adds) > MOST_DRAFTS:
            del self._adds[next(iter(self._adds))]
        self._adds[key][1].run(lambda: self.add(*parts))

    def add(self, token_ids: Tensor, features: Tensor, num: Tensor) -> None:
        """Let pairs wait: of each row the first `num` `[rows, 1]` of `[rows, pairs]`."""
        steps = torch.arange(token_ids.shape[1], device=self.roots.device)
        columns = torch.where(steps < num, self.num_waiting + steps, self.most_waiting).clamp(max=self.most_waiting)
        self.token_ids.scatter_(1, columns, token_ids)
        features = features.to(self.features)
        self.features.scatter_(1, columns[..., None].expand_as(features), features)
        newest = token_ids.gather(1, (num - 1).clamp(0, len(steps) - 1))
        self.roots.copy_(torch.where(num > 0, newest, self.roots))
        self.num_waiting.add_(num)

    def limit(self, depths: tuple[int, ...]) -> None:
        """Set how deep each row's tree may be."""
        if depths != self._host_limits:
            self.limits.copy_(torch.tensor(depths)[:, None], non_blocking=True)
            self._host_limits = depths

    def shown(self, num_pairs: int) -> int:
        """The slots of the text that work must see if a row has so many pairs; the cache grows to hold them."""
        shown = min(shown_slots(num_pairs), self.num_ring_slots) if self.cache.layers else 0
        if shown > self.num_slots:
            self.grow(shown)
        return shown

    def read(self, num_waiting: int, shown: int, work: Callable[[int], None]) -> None:
        """Do the work of reading the pairs that wait, in the fewest columns that hold so many."""
        width = self.most_kept if num_waiting <= self.most_kept else self.most_waiting
        if (width, shown) not in self._reads:
            state = (self.cache.lengths, self.num_waiting, self.first, *self.carried.values())
            self._reads[width, shown] = self._work(state)

        def reading() -> None:
            drafted = torch.arange(self.num_before, device=self.roots.device)
            self.cache.forget(drafted.expand(len(self.roots), -1))
            work(width)

        self._repeat(self._reads[width, shown], shown, reading)

    def draft(self, key: Any, num_nodes: int) -> FixedDraft:
        """The buffers of drafts of one shape; those not used for longest are dropped."""
        found = self._drafts.pop(key, None)
        if found is None:
            with torch.inference_mode(False):
                token_ids = self.roots.repeat(1, num_nodes)
                found = FixedDraft(token_ids, torch.full_like(token_ids, -1))
        self._drafts[key] = found
        while len(self._drafts) > MOST_DRAFTS:
            del self._drafts[next(iter(self._drafts))]
        return found

    def fill(self, draft: FixedDraft, shown: int, work: Callable[[], None]) -> None:
        """Do the work that fills the buffers of a draft."""
        if shown not in draft.work:
            draft.work[shown] = self._work()
        self._repeat(draft.work[shown], shown, work)

    def _work(self, state: Sequence[Tensor] = ()) -> RepeatedWork:
        return RepeatedWork(self.roots.device, state, pool=self._pool)

    def _repeat(self, repeated: RepeatedWork, shown: int, work: Callable[[], None]) -> None:
        def seeing() -> None:
            self.cache.see(self.num_before + shown)
            work()

        repeated.run(seeing)

    def take(self, num: Tensor) -> None:
        """The first `num` `[rows, 1]` of the pairs that wait are read; there are no others."""
        self.cache.lengths.add_(num)
        self.num_waiting.zero_()

    def assign_slots(self, positions: Tensor, is_read: Tensor) -> None:
        """The next forward writes tokens at `positions` `[rows, tokens]` of the text, where they are read at all."""
        slots = (positions % self.num_ring_slots + self.num_before).clamp(max=self.cache.view.num_shown - 1)
        self.cache.view.slots = torch.where(is_read, slots, self.num_before - 1)

    def text_mask(self, positions: Tensor, ends: Tensor) -> Tensor:
        """Mask `[rows, tokens, slots]`: tokens at `positions` see the text up to `ends` `[rows, tokens]`."""
        return functional.pad(self._seen(positions, ends), (self.num_before, 0))

    def _seen(self, positions: Tensor, ends: Tensor) -> Tensor:
        """Mask `[rows, tokens, text slots]`; the last of `ends` is the newest token of the text, or behind it."""
        if self.window is None:
            return self._positions <= ends[..., None]
        newest = ends[:, -1:]
        held = newest - (newest - self._positions) % self.num_ring_slots  # negative where there is nothing
        seen = (held[:, None] <= ends[..., None]) & (held >= 0)[:, None]
        return within_reach(seen, positions, held, self.window)

    def draft_mask(self, seen: Tensor, positions: Tensor) -> Tensor:
        """[`StaticTreeGenerator.draft_mask`]; it assigns slots, too."""
        num_rows, num_tokens, num_drafted = seen.shape
        steps = torch.arange(num_drafted - num_tokens, num_drafted, device=seen.device)
        self.cache.view.slots = steps.expand(num_rows, -1)
        text = self._seen(positions, (self.cache.lengths - 1).expand(-1, num_tokens))
        return torch.cat([functional.pad(seen, (0, self.num_before - num_drafted)), text], dim=-1)

    def slot_positions(self, drafted: Tensor) -> Tensor:
        """Where the tokens in all slots stand in the text: `[rows, slots]`, given drafted ones `[rows, tokens]`."""
        missing = self.num_before - drafted.shape[1]
        return torch.cat([functional.pad(drafted, (0, missing)), self._positions.expand(len(drafted), -1)], dim=-1)

    @property
    def _positions(self) -> Tensor:
        return torch.arange(self.cache.view.num_shown - self.num_before, device=self.roots.device)


def newest_of(states: Tensor, indices: Tensor) -> Tensor:
    """The entries of `states` `[rows, tokens, size]` at `indices` `[rows, wanted]`, or those nearest to these."""
    indices = indices.clamp(0, states.shape[1] - 1)
    return states.gather(1, indices[..., None].expand(-1, -1, states.shape[-1]))
