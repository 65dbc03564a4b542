"""What a drafter keeps of texts: pairs that wait to be read, what it carries on from them, and keys and values.

A row's pairs wait in its first columns. Its tokens that were read stand in the first slots of a cache, of which the
last one in sight takes what nobody reads; drafted tokens stand behind. With a sliding window the slots of the text are
a ring, in which new tokens take the place of those that no window reaches.

With exact shapes everything is as large as the text asks for, and work simply runs. With buckets tensors have a few
sizes and stay where they are, so that work on them can be repeated, also in later calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...core.masks import within_reach
from ...generation.capture.graph import MemoryPool, RepeatedWork
from ...generation.drafting import Committed, Kept
from ...generation.slot_cache import Shapes, SlotCache, bucket
from ...generation.stock_cache import ENDLESS, HOLE

LEAST_WAITING = 64  # pairs of a row that can wait for a drafter that is not asked
MOST_DRAFTS = 16  # shapes of drafts that are kept, each for one temperature
MULTIPLE = 8  # of slots: kernels of attention want masks so aligned
GROWTH = 1.5  # times what is there, where exact shapes need more room

ReadPairs = Callable[[Tensor, Tensor, Tensor], Tensor]  # of ids, features and numbers of pairs the first features


@dataclass(frozen=True)
class TextKind:
    """What buffers depend on besides the length of texts."""

    shapes: Shapes
    num_rows: int
    device: torch.device
    feature_size: int
    feature_dtype: torch.dtype
    num_layers: int  # of the drafter that keep keys and values
    num_draft_slots: int  # most tokens that are fed to draft a tree, as a rule
    most_kept: int  # tokens of a row in a step, as a rule
    window: int | None  # newest tokens of the text that are seen
    reach: int  # newest tokens of the text on which drafts depend
    settings: Any = None  # what else decides the work, besides weights and what drafts are asked for


@dataclass
class FixedDraft:
    """The buffers of drafts of one shape, and the work that fills them, by the slots that it sees."""

    token_ids: Tensor  # [rows, nodes]
    parents: Tensor  # [rows, nodes]
    constants: dict[Any, Any] = field(default_factory=dict)  # read by the work, so they must stay
    work: dict[int, RepeatedWork] = field(default_factory=dict)
    copies: dict[Any, RepeatedWork] = field(default_factory=dict)  # as `Draft.copies`


class DraftText:
    """The texts of all rows, as a drafter reads them.

    Nothing here holds drafter or target: work gets them when it runs.
    """

    @torch.inference_mode(False)
    def __init__(self, kind: TextKind, num_slots: int, carried: Mapping[str, Tensor]) -> None:
        self.kind = kind
        self.is_fixed = not kind.shapes.is_exact
        self.most_waiting = max(kind.most_kept, LEAST_WAITING)
        self.num_ring_slots = ENDLESS
        if kind.window is not None:
            num_read_at_once = max(kind.reach, self.most_waiting * self.is_fixed)
            self.num_ring_slots = _aligned(kind.window + num_read_at_once + 1) - 1

        self.num_slots = min(kind.shapes.slots(num_slots), self.num_ring_slots + 1) if kind.num_layers else 0
        self.num_shown = self.num_slots  # of the text
        self._num_drafted = 0
        capacity = self.num_slots + _aligned(kind.num_draft_slots)
        self.cache = SlotCache(kind.num_layers, kind.num_rows, capacity, kind.device)

        self.roots = torch.zeros(kind.num_rows, 1, dtype=torch.long, device=kind.device)  # newest tokens
        self.limits = torch.zeros_like(self.roots)  # how deep each row's tree may be
        self.device_num_waiting = torch.zeros_like(self.roots)
        self.carried = {name: states.clone() for name, states in carried.items()}  # [rows, ...] from pair to pair
        self.token_ids = self.roots[:, :0]  # [rows, columns] of pairs that wait
        self.features = torch.zeros(kind.num_rows, 0, kind.feature_size, dtype=kind.feature_dtype, device=kind.device)

        # [rows, 1, k, hidden] features of the first pass of a draft, once text is read
        self.first = torch.empty(0, dtype=torch.float)
        self.begin()
        self.num_reading: list[int] | None = None  # pairs of each row that are read now, where the host knows it
        self.is_repeating = False  # what runs now will be repeated
        self._host_limits: tuple[int, ...] = ()

        self.pool = MemoryPool()
        self._adds: dict[Any, tuple[Kept, RepeatedWork]] = {}  # by where what is added lies
        self._reads: dict[tuple[int, int], RepeatedWork] = {}
        self._drafts: dict[Any, FixedDraft] = {}
        self._make_room(self.most_waiting)

    def begin(self) -> None:
        """Forget the texts of an earlier call."""
        self.num_waiting = [0] * self.kind.num_rows  # pairs of each row
        self.num_read = [0] * self.kind.num_rows  # pairs of each row
        self.num_new = [0] * self.kind.num_rows  # pairs of each row that were read since the last draft

        self.cache.clear()
        for states in (self.cache.lengths, self.device_num_waiting, *self.carried.values()):
            states.zero_()

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        chosen = list(rows)
        self.kind = replace(self.kind, num_rows=len(chosen))
        self.cache.select(chosen)
        for name in ("token_ids", "features", "roots", "limits", "device_num_waiting", "first"):
            states = getattr(self, name)
            setattr(self, name, states[chosen] if len(states) else states)

        for name, states in self.carried.items():
            self.carried[name] = states[chosen]

        for name in ("num_waiting", "num_read", "num_new"):
            setattr(self, name, [getattr(self, name)[row] for row in chosen])

        self._drafts = {}

    @property
    def repeated(self) -> list[RepeatedWork]:
        """All work that is held."""
        drafts = [work for draft in self._drafts.values() for work in (*draft.work.values(), *draft.copies.values())]
        return [*(work for _, work in self._adds.values()), *self._reads.values(), *drafts]

    def _make_room(self, num_columns: int) -> None:
        """Let so many pairs of a row wait; work on them is captured anew."""
        self.pool.flush()
        self.room = num_columns
        self._adds, self._reads = {}, {}
        old_ids, old_features = self.token_ids, self.features
        num_held = max(self.num_waiting)
        with torch.inference_mode(False):  # the last column takes what does not count
            self.token_ids = old_ids.new_zeros(len(old_ids), num_columns + 1)
            self.features = old_features.new_zeros(len(old_ids), num_columns + 1, old_features.shape[-1])

        self.token_ids[:, :num_held] = old_ids[:, :num_held]
        self.features[:, :num_held] = old_features[:, :num_held]

    def add(self, committed: Committed) -> None:
        """Let the pairs of a commit wait, behind the others of their row."""
        assert committed.features is not None  # a drafter of this kind reads at least one layer
        self._count(committed.num_new)
        for row, (length, num_new) in enumerate(zip(committed.lengths, committed.num_new, strict=True)):
            ids = committed.sequence_ids[row, :length]
            columns = slice(self.num_waiting[row] - num_new, self.num_waiting[row])
            self.token_ids[row, columns].copy_(ids[length - num_new :])
            self.features[row, columns].copy_(committed.features[row, :num_new])
            self.roots[row].copy_(ids[-1:])

        if self.is_fixed:
            self.device_num_waiting.copy_(torch.tensor(self.num_waiting)[:, None])

    def add_kept(self, kept: Kept) -> None:
        """The same of what a step kept, in buffers that every such step writes anew."""
        assert kept.features is not None  # as above
        self._count(kept.num_new)
        parts = (kept.token_ids, kept.features, kept.num)
        key = tuple((part.data_ptr(), part.shape) for part in parts)
        if key not in self._adds:
            self._adds[key] = (kept, self._work((self.device_num_waiting, self.roots)))

        while len(self._adds) > MOST_DRAFTS:
            del self._adds[next(iter(self._adds))]

        self._adds[key][1].run(lambda: self._add(*parts))

    def _count(self, num_new: Sequence[int]) -> None:
        """Count pairs that will wait, and make room for them."""
        num_waiting = list(map(add, self.num_waiting, num_new))
        if max(num_waiting) > self.room:
            self._make_room(max(*num_waiting, int(GROWTH * self.room)))

        self.num_waiting = num_waiting

    def _add(self, token_ids: Tensor, features: Tensor, num: Tensor) -> None:
        """Let pairs wait: of each row the first `num` `[rows, 1]` of `[rows, pairs]`; the work that is repeated."""
        steps = torch.arange(token_ids.shape[1], device=self.roots.device)
        columns = torch.where(steps < num, self.device_num_waiting + steps, self.room).clamp(max=self.room)
        self.token_ids.scatter_(1, columns, token_ids)
        features = features.to(self.features)
        self.features.scatter_(1, columns[..., None].expand_as(features), features)

        newest = token_ids.gather(1, (num - 1).clamp(0, len(steps) - 1))
        self.roots.copy_(torch.where(num > 0, newest, self.roots))
        self.device_num_waiting.add_(num)

    def limit(self, depths: tuple[int, ...]) -> None:
        """Set how deep each row's tree may be."""
        if depths != self._host_limits:
            self.limits.copy_(torch.tensor(depths)[:, None], non_blocking=True)
            self._host_limits = depths

    def shown(self, num_pairs: int) -> int:
        """The slots of the text that work must see if a row has so many pairs; the cache grows to hold them."""
        if not self.kind.num_layers:
            return 0

        most = self.num_ring_slots + 1
        shown = min(self.kind.shapes.slots(num_pairs + 1), most)
        if shown > self.num_slots:
            self.num_slots = shown if self.is_fixed else min(max(shown, int(GROWTH * self.num_slots)), most)
            self._grow()

        return shown

    def _grow(self) -> None:
        """Make room in the cache; work is captured anew."""
        self.pool.flush()
        self._reads, self._drafts = {}, {}
        self.cache.grow(max(self.num_slots, self.num_shown + self._num_drafted) + _aligned(self.kind.num_draft_slots))

    def read(self, read_pairs: ReadPairs) -> None:
        """Read all pairs that wait."""
        if not any(self.num_waiting):
            return

        if self.is_fixed:
            self._count_read(self.num_waiting)
            shown = self.shown(max(self.num_read))
            width = bucket(max(self.num_waiting), (self.kind.most_kept, self.room))
            if (width, shown) not in self._reads:
                state = (self.cache.lengths, self.device_num_waiting, self.first, *self.carried.values())
                self._reads[width, shown] = self._work(state)

            self._repeat(self._reads[width, shown], shown, lambda: self._read_waiting(read_pairs, width))
        else:
            self.read_now(read_pairs, self)

        self.num_waiting = [0] * len(self.num_waiting)
        if self.room > LEAST_WAITING and not self.is_fixed:  # a prompt may have needed much
            self._make_room(LEAST_WAITING)

    def read_now(self, read_pairs: ReadPairs, source: "DraftText") -> None:
        """Read all pairs that wait in `source`; this is not repeated."""
        num_columns = max(source.num_waiting)
        self._count_read(source.num_waiting)
        self.num_shown = self.shown(max(self.num_read))
        self.num_reading = list(source.num_waiting)

        num = torch.tensor(source.num_waiting, device=self.roots.device)[:, None]
        self._take(read_pairs, source.token_ids[:, :num_columns], source.features[:, :num_columns], num)
        self.num_reading = None

    def _count_read(self, num_pairs: Sequence[int]) -> None:
        """Count pairs of each row that are read."""
        self.num_read = list(map(add, self.num_read, num_pairs))
        self.num_new = list(map(add, self.num_new, num_pairs))

    def _read_waiting(self, read_pairs: ReadPairs, width: int) -> None:
        """Read the pairs of the first columns; the work that is repeated."""
        self._take(read_pairs, self.token_ids[:, :width], self.features[:, :width], self.device_num_waiting)
        self.device_num_waiting.zero_()

    def _take(self, read_pairs: ReadPairs, token_ids: Tensor, features: Tensor, num: Tensor) -> None:
        after = self.cache.lengths + num
        first = read_pairs(token_ids, features, num)
        self.cache.lengths.copy_(after)

        if not len(self.first):
            with torch.inference_mode(False):
                self.first = torch.zeros_like(first)

        self.first.copy_(torch.where(num[..., None, None] > 0, first, self.first))

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
        return RepeatedWork(self.roots.device, state, pool=self.pool)

    def _repeat(self, repeated: RepeatedWork, shown: int, work: Callable[[], None]) -> None:
        def repeating() -> None:
            self.num_shown = shown
            self.is_repeating = True
            try:
                work()
            finally:
                self.is_repeating = False

        repeated.run(repeating)

    def take_slots(self, num_columns: int, num: Tensor, num_drafted: int = 0) -> Tensor:
        """Positions `[rows, num_columns]` behind the text, where the next forward writes the first `num` `[rows, 1]`.

        Then it writes `num_drafted` drafted tokens.
        """
        steps = torch.arange(num_columns, device=num.device)
        positions = self.cache.lengths + steps
        self.assign_slots(positions, steps < num, num_drafted)
        return positions

    def assign_slots(self, positions: Tensor, is_read: Tensor, num_drafted: int = 0) -> None:
        """The next forward writes tokens at `positions` `[rows, tokens]` of the text, where they are read at all.

        Then it writes `num_drafted` drafted tokens.
        """
        if num_drafted:
            self._see_drafted(num_drafted)
        else:
            self.cache.see(self.num_shown)

        slots = torch.where(is_read, positions % self.num_ring_slots, self.num_shown - 1)
        if num_drafted:
            drafted = torch.arange(self.num_shown, self.num_shown + num_drafted, device=positions.device)
            slots = torch.cat([slots, drafted.expand(len(positions), -1)], dim=-1)

        self.cache.view.write_to(slots)

    def _see_drafted(self, num_drafted: int) -> None:
        """Let the next forward see the slots of all drafted tokens, too."""
        self._num_drafted = max(self._num_drafted, num_drafted)
        room = _aligned(max(num_drafted, self.kind.num_draft_slots * self.is_fixed))
        if self.num_shown + room > self.cache.capacity:
            self._grow()

        self.cache.see(self.num_shown + room)

    def forget_drafted(self) -> None:
        """Overwrite what drafted tokens left: masked slots must be finite, as 0 times NaN is NaN."""
        if self._num_drafted:
            for layer in self.cache.layers:
                for states in layer.held.values():
                    states[:, :, self.num_shown : self.num_shown + self._num_drafted].zero_()

        self._num_drafted = 0

    def text_mask(self, positions: Tensor, ends: Tensor) -> Tensor:
        """Mask `[rows, tokens, text slots]`: tokens at `positions` see the text up to `ends` `[rows, tokens]`.

        The last of `ends` is the newest token of the text, or behind it.
        """
        slots = torch.arange(self.num_shown, device=self.roots.device)
        if self.kind.window is None or self.num_shown + self._num_drafted <= self.kind.window:  # it reaches all
            return slots <= ends[..., None]

        newest = ends[:, -1:]
        held = newest - (newest - slots) % self.num_ring_slots  # negative where there is nothing
        is_text = (held >= 0) & (slots < self.num_ring_slots)
        seen = (held[:, None] <= ends[..., None]) & is_text[:, None]
        return within_reach(seen, positions, held, self.kind.window)

    def draft_mask(self, seen: Tensor, positions: Tensor) -> Tensor:
        """Mask `[rows, tokens, slots]` of drafted tokens: all text within the window, and `seen` of the drafted ones.

        The tokens stand at `positions` `[rows, tokens]` of the text, and get the slots behind those drafted before.
        """
        _, num_tokens, num_drafted = seen.shape
        self._see_drafted(num_drafted)
        self.cache.view.write_from(self.num_shown + num_drafted - num_tokens)
        text = self.text_mask(positions, (self.cache.lengths - 1).expand(-1, num_tokens))
        missing = self.cache.view.num_shown - self.num_shown - num_drafted
        return torch.cat([text, functional.pad(seen, (0, missing))], dim=-1)

    def slot_positions(self, drafted: Tensor) -> Tensor:
        """Where tokens in all slots in sight stand in the text, `[rows, slots]`; `drafted` ones `[rows, tokens]`."""
        slots = torch.arange(self.num_shown, device=drafted.device).expand(len(drafted), -1)
        missing = self.cache.view.num_shown - self.num_shown - drafted.shape[1]
        return torch.cat([slots, functional.pad(drafted, (0, missing), value=HOLE)], dim=-1)


def newest_of(states: Tensor, indices: Tensor) -> Tensor:
    """The entries of `states` `[rows, tokens, size]` at `indices` `[rows, wanted]`, or those nearest to these."""
    indices = indices.clamp(0, states.shape[1] - 1)
    return states.gather(1, indices[..., None].expand(-1, -1, states.shape[-1]))


def _aligned(num_slots: int) -> int:
    """The least multiple of `MULTIPLE` that holds so many."""
    return -(-num_slots // MULTIPLE) * MULTIPLE
