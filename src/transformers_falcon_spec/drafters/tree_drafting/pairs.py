"""The base of generators that read pairs of feature and token: unread pairs, and the slots of the cache."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache

from ...core.masks import within_reach
from ...generation.cache import ENDLESS, HOLE
from ...generation.drafting import Committed, Draft, DraftBudget, Kept, TargetView, TreeCandidateGenerator
from ...generation.row_slots import RowSlots
from ...generation.static.compile import compiled_call
from .fixed import FixedPairs, ReadPrompt
from .pending import PendingPairs

# Pairs of drafted text that wait for a drafter that is not asked; then its history starts anew with these.
MOST_WAITING = 512
SWITCHING = ("dynamic", "longrope")  # kinds of rotary positions


class PairGenerator(TreeCandidateGenerator):
    """A generator whose drafter keeps keys and values of committed pairs, each row its own."""

    can_be_fixed: ClassVar[bool] = False  # whether it has `read_unread`, `read_pairs` and `draft_fixed`
    least_pairs: int = 1  # of a row before anything is drafted

    def __init__(self, drafter: Any, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(target, max_length, rng)
        self.drafter = drafter
        self.feature_layers = drafter.feature_layers
        self.window: int | None = drafter.sliding_window
        self.pending: list[PendingPairs] = []  # of each row
        self.num_read: list[int] = []  # of each row the committed pairs read so far
        self.slots = RowSlots(DynamicCache(), torch.zeros(1, 0, dtype=torch.long))
        self.fixed: FixedPairs | None = None  # takes the place of all these but `num_read`
        self._num_waiting: list[int] = []  # of each row, there

    def commit(self, committed: Committed) -> None:
        """Keep the new pairs for the next proposal."""
        if self.fixed is not None:
            self._commit_fixed(committed)
            return
        assert committed.features is not None  # a drafter of this kind reads at least one layer
        if not self.pending:
            self.pending = [PendingPairs() for _ in committed.lengths]
            self.num_read = [0] * len(self.pending)
            self.slots = RowSlots(DynamicCache(), committed.sequence_ids[:, :0])
        for row, (length, num_new) in enumerate(zip(committed.lengths, committed.num_new, strict=True)):
            ids = committed.sequence_ids[row, :length]
            self.pending[row].add(ids[length - num_new :], committed.features[row, :num_new], ids[-1:])
        if max(pending.num_waiting for pending in self.pending) > MOST_WAITING:
            self.restart()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.pending = [self.pending[row] for row in rows]
        if self.num_read:  # else nothing is kept of what was read
            self.num_read = [self.num_read[row] for row in rows]
            self.slots.select(rows)

    def restart(self) -> None:
        """Forget what was read: the newest pairs that wait become the whole history."""
        for pending in self.pending:
            pending.keep_newest(MOST_WAITING)
        self.num_read = [0] * len(self.pending)
        self.slots = RowSlots(DynamicCache(), self.slots.positions[:, :0])

    @property
    def roots(self) -> Tensor:
        """The newest committed token of each row, `[rows, 1]`, on the drafter's device."""
        if self.fixed is not None:
            return self.fixed.roots
        return torch.stack([pending.root for pending in self.pending]).to(self.drafter.device)

    @property
    def num_unread(self) -> list[int]:
        """Of each row the pairs not read yet."""
        return [sum(map(len, pending.token_ids)) for pending in self.pending]

    @property
    def has_unread(self) -> bool:
        """Whether there are pairs that the drafter has not read."""
        return any(self.num_unread)

    @property
    def reach(self) -> int:
        """The newest pairs of a row on which drafts depend: a window for each layer, and a block that is read anew."""
        if self.window is None:
            return ENDLESS
        return self.drafter.config.num_hidden_layers * self.window + self.least_pairs

    def take_pending(self, padding_side: str = "right", most: int = ENDLESS) -> tuple[Tensor, Tensor, list[int]]:
        """Ids `[rows, pairs]` and features `[rows, pairs, feature]` of unread pairs, and each row's number.

        Those that wait before the newest `most` are left out, and count as read.
        """
        rows = zip(*(pending.take(most) for pending in self.pending), strict=True)
        ids, features = (pad_sequence(list(part), batch_first=True, padding_side=padding_side) for part in rows)
        num_new = [pending.num_taken for pending in self.pending]
        self.num_read = [num + new for num, new in zip(self.num_read, num_new, strict=True)]
        return ids, features, [min(num, most) for num in num_new]

    def assign_slots(self, num_tokens: list[int]) -> Tensor:
        """Assign slots to each row's newest tokens; their positions `[rows, tokens]`, right-aligned, holes before."""
        num_read = self.lengths
        positions = num_read + torch.arange(-max(num_tokens), 0, device=num_read.device)
        if min(num_tokens) < max(num_tokens):
            first = num_read - torch.tensor(num_tokens, device=num_read.device)[:, None]
            positions = positions.masked_fill(positions < first, HOLE)
        self._drop_unseen(num_tokens)
        self.slots.tidy()
        self.slots.positions = self.slots.positions.to(num_read.device)
        self.slots.append(positions, num_tokens)
        return positions

    def _drop_unseen(self, num_tokens: Sequence[int]) -> None:
        """Before each row reads so many tokens, drop what none of them sees: at times, and as much as a window."""
        if self.window is None or not len(self.slots):
            return
        num_seen = self.window - 1 + self.least_pairs - 1  # a later block may read some of them anew
        if len(self.slots) > num_seen + self.window or max(num_tokens) >= self.reach:
            self.slots.keep_newest([0 if num >= self.reach else num_seen for num in num_tokens])

    def causal_mask(self, positions: Tensor, ends: Tensor | None = None) -> Tensor:
        """Mask `[rows, tokens, slots]`: tokens at `positions` see the text up to themselves, or up to `ends`."""
        held = self.slots.positions
        last = positions if ends is None else ends
        seen = (held[:, None] <= last[..., None]) & (held != HOLE)[:, None]
        return within_reach(seen, positions, held, self.window)

    def draft_mask(self, seen: Tensor, positions: Tensor) -> Tensor:
        """Mask `[rows, tokens, slots]` of drafted tokens: all text within the window, and `seen` of the draft's slots.

        The tokens stand at `positions` `[rows, tokens]` of the text.
        """
        if self.fixed is not None:
            return self.fixed.draft_mask(seen, positions)
        return torch.cat([self.causal_mask(positions), seen.to(positions.device)], dim=-1)

    @property
    def cache(self) -> Cache:
        """Where keys and values of drafted tokens go."""
        return self.slots.cache if self.fixed is None else self.fixed.cache

    @property
    def lengths(self) -> Tensor:
        """The number of pairs read of each row, `[rows, 1]`, on the drafter's device."""
        if self.fixed is not None:
            return self.fixed.cache.lengths
        return torch.tensor(self.num_read, device=self.drafter.device)[:, None]

    def forget_drafted(self) -> None:
        """Drop the keys and values of drafted tokens; fixed ones are overwritten."""
        if self.fixed is None:
            self.slots.forget_drafted()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of the target, or of the drafter where it has its own, in the drafter's type and device."""
        own = getattr(self.drafter, "embed_tokens", None)
        read = self.target.embed if own is None else own
        return self.to_drafter(read(token_ids))

    def to_drafter(self, states: Tensor) -> Tensor:
        """`states` in the drafter's type and device."""
        return states.to(self.drafter.device, self.drafter.dtype)

    def run(self, name: str, *inputs: Any) -> Any:
        """What the drafter's method of this name gives; it is compiled in fixed shapes if the call asks for it."""
        if self.fixed is None or self.backend is None:
            return getattr(self.drafter, name)(*inputs)
        return compiled_call(self.drafter, self.backend, name, *inputs)

    def why_not_fixed(self, budget: DraftBudget) -> str | None:
        """Why drafts within such budgets cannot be made in fixed shapes, in words; None if they can."""
        if not self.can_be_fixed:
            return super().why_not_fixed(budget)
        rotary = getattr(self.drafter, "rotary_emb", None)
        if rotary is not None and rotary.rope_type in SWITCHING:
            return "the drafter's rotary frequencies depend on the length of the text"
        return why_probs_matter(budget)

    def enter_fixed(self, num_slots: int, most_kept: int, buffers: Any = None) -> FixedPairs:
        """Read what waits, move all that is known of the text to buffers, and go on in them."""
        assert any(self.num_unread)  # else nothing can be drafted from
        pair, first = self.pending[0].features[0], self.read_unread()
        sizes = (self.num_draft_slots, most_kept, self.window, self.settings)
        prompt = ReadPrompt(self.slots, self.num_read, self.roots, first, pair, self.carried(), *sizes)
        is_fit = isinstance(buffers, FixedPairs) and buffers.made_for == prompt.shapes
        fixed: FixedPairs = buffers if is_fit else FixedPairs(prompt, num_slots)
        fixed.load(prompt)
        self.fixed, self._num_waiting, self.pending = fixed, [0] * len(self.num_read), []
        self.slots = RowSlots(DynamicCache(), self.slots.positions[:, :0])
        return fixed

    @property
    def num_draft_slots(self) -> int:
        """The most tokens that are fed to draft a tree."""
        raise NotImplementedError

    @property
    def settings(self) -> Any:
        """What decides work in fixed shapes besides weights, the text and what drafts are asked for."""
        return None

    def read_unread(self) -> Tensor:
        """Read what waits, as ever: features `[rows, 1, k, hidden]` of the first pass over each row's newest pairs."""
        raise NotImplementedError

    def carried(self) -> dict[str, Tensor]:
        """States of fixed shape, besides keys and values, that go from step to step, by name."""
        return {}

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:
        """[`PairGenerator.read_unread`] of the first `num` `[rows, 1]` of `[rows, pairs]`, in fixed shapes.

        It changes `carried`, where that is kept, and writes keys and values; `lengths` come after it.
        """
        raise NotImplementedError

    def draft_fixed(self, budget: DraftBudget, shown: int) -> Draft:
        """A tree within the budget in the buffers, which were filled with so many slots of the text in sight."""
        raise NotImplementedError

    def propose_fixed(self, budget: DraftBudget) -> Draft | None:
        """Read what waits, and draft; None while no row has pairs enough."""
        assert self.fixed is not None  # the caller asked
        assert budget.prices is None  # the host would be asked what pays
        self._catch_up()
        if max(self.num_read) < self.least_pairs:
            return None
        return self.draft_fixed(budget, self.fixed.shown(max(self.num_read)))

    def commit_kept(self, kept: Kept) -> None:
        """Let the new pairs wait, which lie where those of all such steps lie; if they are too many, they are read."""
        assert self.fixed is not None  # `enter_fixed` comes first
        if max(kept.num_new) > self.fixed.most_waiting:
            self._commit_in_pieces(kept)
        else:
            self._let_wait(kept.num_new)
            self.fixed.add_kept(kept)

    def _let_wait(self, num_new: Sequence[int]) -> None:
        """Count pairs that will wait, after reading what waits if they are too many together."""
        assert self.fixed is not None  # the caller asked
        if max(map(sum, zip(self._num_waiting, num_new, strict=True))) > self.fixed.most_waiting:
            self._catch_up()
        self._num_waiting = [old + new for old, new in zip(self._num_waiting, num_new, strict=True)]

    def _commit_in_pieces(self, kept: Kept) -> None:
        assert self.fixed is not None  # the caller asked
        assert kept.features is not None  # as above
        most = self.fixed.most_waiting
        for start in range(0, max(kept.num_new), most):
            self._let_wait([min(max(num - start, 0), most) for num in kept.num_new])
            piece = slice(start, start + most)
            self.fixed.add(kept.token_ids[:, piece], kept.features[:, piece], (kept.num - start).clamp(0, most))

    def _commit_fixed(self, committed: Committed) -> None:
        """The same of pairs that the host knows."""
        assert committed.features is not None  # as above
        device, features = self.drafter.device, committed.features
        ids, num_new = committed.sequence_ids, torch.tensor(committed.num_new, device=device)[:, None]
        first = torch.tensor(committed.lengths, device=device)[:, None] - num_new
        columns = (first + torch.arange(features.shape[1], device=device)).clamp(max=ids.shape[1] - 1)
        self._commit_in_pieces(Kept(ids.to(device).gather(1, columns), features, num_new, committed.num_new))

    def _catch_up(self) -> None:
        """Read the pairs that wait."""
        assert self.fixed is not None  # the caller asked
        if not any(self._num_waiting):
            return
        self.num_read = [old + new for old, new in zip(self.num_read, self._num_waiting, strict=True)]
        self.fixed.read(max(self._num_waiting), self.fixed.shown(max(self.num_read)), self._read_waiting)
        self._num_waiting = [0] * len(self.num_read)

    def _read_waiting(self, width: int) -> None:
        """Read the pairs of the first columns; the work that is repeated."""
        assert self.fixed is not None  # the caller asked
        fixed, num = self.fixed, self.fixed.num_waiting
        first = self.read_pairs(fixed.token_ids[:, :width], fixed.features[:, :width], num)
        fixed.first.copy_(torch.where(num[..., None, None] > 0, first, fixed.first))
        fixed.take(num)


def gives_probs(budget: DraftBudget) -> bool:
    """Whether tokens are drawn, so that what they were drawn from is needed."""
    return budget.temperature is not None and budget.noise is None


def why_probs_matter(budget: DraftBudget) -> str | None:
    """Why a draft needs probabilities, which none in fixed shapes has, in words; None if it does not."""
    if gives_probs(budget):
        return "drafts are drawn, and their probabilities compared with the target's"
    return "an observer asks for the probabilities of drafted tokens" if budget.wants_node_probs else None
