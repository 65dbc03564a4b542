"""The base of generators that read pairs of feature and token: unread pairs, and the slots of the cache."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from ...generation.cache import HOLE, RowSlots
from ...generation.drafting import Committed, TargetView, TreeCandidateGenerator

# Pairs of drafted text that wait for a drafter that is not asked; then its history starts anew with these.
MOST_WAITING = 512


class PendingPairs:
    """Pairs of one row that the drafter has not read yet."""

    def __init__(self) -> None:
        self.token_ids: list[Tensor] = []
        self.features: list[Tensor] = []
        self.root = torch.empty(0, dtype=torch.long)  # [1] newest committed token
        self.num_taken = 0
        self.num_waiting = 0  # pairs, those of the first commit left out

    def add(self, token_ids: Tensor, features: Tensor, root: Tensor) -> None:
        """Pairs of a commit; maybe none."""
        self.num_waiting += len(token_ids) if self.token_ids or self.num_taken else 0
        self.token_ids.append(token_ids)
        self.features.append(features)
        self.root = root

    def take(self) -> tuple[Tensor, Tensor]:
        """All pairs that wait, in order; they no longer wait."""
        token_ids, features = torch.cat(self.token_ids), torch.cat(self.features)
        self.token_ids, self.features, self.num_taken, self.num_waiting = [], [], len(token_ids), 0
        return token_ids, features

    def keep_newest(self, num: int) -> None:
        """Forget all but the newest `num` that wait."""
        self.token_ids = [torch.cat(self.token_ids)[-num:]]
        self.features = [torch.cat(self.features)[-num:]]
        self.num_waiting = 0


class PairGenerator(TreeCandidateGenerator):
    """A generator whose drafter keeps keys and values of committed pairs, each row its own."""

    def __init__(self, drafter: Any, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(target, max_length, rng)
        self.drafter = drafter
        self.feature_layers = drafter.feature_layers
        self.pending: list[PendingPairs] = []  # of each row
        self.num_read: list[int] = []  # of each row the committed pairs read so far
        self.slots = RowSlots(DynamicCache(), torch.zeros(1, 0, dtype=torch.long))

    def commit(self, committed: Committed) -> None:
        """Keep the new pairs for the next proposal."""
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

    def restart(self) -> None:
        """Forget what was read: the newest pairs that wait become the whole history."""
        for pending in self.pending:
            pending.keep_newest(MOST_WAITING)
        self.num_read = [0] * len(self.pending)
        self.slots = RowSlots(DynamicCache(), self.slots.positions[:, :0])

    @property
    def roots(self) -> Tensor:
        """The newest committed token of each row, `[rows, 1]`, on the drafter's device."""
        return torch.stack([pending.root for pending in self.pending]).to(self.drafter.device)

    @property
    def num_unread(self) -> list[int]:
        """Of each row the pairs not read yet."""
        return [sum(map(len, pending.token_ids)) for pending in self.pending]

    def take_pending(self, padding_side: str = "right") -> tuple[Tensor, Tensor, list[int]]:
        """Ids `[rows, pairs]` and features `[rows, pairs, feature]` of all unread pairs, and each row's number."""
        rows = zip(*(pending.take() for pending in self.pending), strict=True)
        ids, features = (pad_sequence(list(part), batch_first=True, padding_side=padding_side) for part in rows)
        num_new = [pending.num_taken for pending in self.pending]
        self.num_read = [num + new for num, new in zip(self.num_read, num_new, strict=True)]
        return ids, features, num_new

    def assign_slots(self, num_tokens: list[int]) -> Tensor:
        """Assign slots to each row's newest tokens; their positions `[rows, tokens]`, right-aligned, holes before."""
        num_read = torch.tensor(self.num_read, device=self.drafter.device)
        positions = num_read[:, None] + torch.arange(-max(num_tokens), 0, device=num_read.device)
        if min(num_tokens) < max(num_tokens):
            first = num_read - torch.tensor(num_tokens, device=num_read.device)
            positions = positions.masked_fill(positions < first[:, None], HOLE)
        self.slots.tidy()
        self.slots.positions = self.slots.positions.to(num_read.device)
        self.slots.append(positions, num_tokens)
        return positions

    def causal_mask(self, positions: Tensor) -> Tensor:
        """Mask `[rows, tokens, slots]`: tokens at `positions` see the text up to themselves."""
        held = self.slots.positions[:, None]
        return (held <= positions[..., None]) & (held != HOLE)

    def draft_mask(self, seen: Tensor) -> Tensor:
        """Mask `[rows, tokens, slots]` of drafted tokens, which see the whole text and `seen` of the draft's slots."""
        held = (self.slots.positions != HOLE)[:, None].expand(-1, seen.shape[1], -1)
        return torch.cat([held, seen.to(held.device)], dim=-1)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embeddings in the drafter's type and device."""
        return self.to_drafter(self.target.embed(token_ids))

    def to_drafter(self, states: Tensor) -> Tensor:
        """`states` in the drafter's type and device."""
        return states.to(self.drafter.device, self.drafter.dtype)
