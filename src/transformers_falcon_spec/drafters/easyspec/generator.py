"""Drafting with EasySpec: one exact pass over new text, then a tree, one depth a pass, with layers in groups.

The exact pass also reads what was kept of the last draft, whose rough keys and values are dropped: the paper's
calibration (arXiv 2502.02493, section 4.3).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...generation.drafting import Committed, Draft, DraftBudget, Kept, TargetView
from ...generation.static.eligibility import obstacle_in
from ...generation.tree_attention import tree_attention
from ..config_fields import context_of
from ..tree_drafting.fixed import newest_of
from ..tree_drafting.grown import GrownTreeGenerator

if TYPE_CHECKING:
    from .modeling_easyspec import LayerParallelDrafter


class LayerParallelCandidateGenerator(GrownTreeGenerator):
    """Drafting with a [`LayerParallelDrafter`] during one call; all rows share the passes, each has its own tree.

    What other generators do with pairs it does with tokens: their features have no width.
    """

    drafter: "LayerParallelDrafter"
    can_be_fixed = True

    def __init__(
        self, drafter: "LayerParallelDrafter", target: TargetView, max_length: int, rng: torch.Generator
    ) -> None:
        num_shared = drafter.config.draft_vocab_size
        assert num_shared is not None  # filled in
        if num_shared != drafter.config.vocab_size:
            self.draft_token_ids = torch.arange(num_shared, device=drafter.device)
        super().__init__(drafter, target, max_length, rng)
        self._backend = drafter.backend()
        context = context_of(drafter.model.config)
        self._context = max_length if context is None else context
        self._draft_positions = torch.empty(0, dtype=torch.long)  # [rows, draft slots] where drafted tokens stand

    def commit(self, committed: Committed) -> None:
        """Keep the new tokens for the next proposal; at first the whole text."""
        is_first = not self.pending and self.fixed is None
        num_new = committed.lengths if is_first else committed.num_new
        nothing = torch.empty(len(num_new), max(num_new), 0, dtype=torch.float)
        super().commit(replace(committed, num_new=num_new, features=nothing))

    def commit_kept(self, kept: Kept) -> None:
        """Let the new tokens wait, which lie where those of all such steps lie."""
        nothing = torch.empty(*kept.token_ids.shape, 0, dtype=torch.float, device=kept.token_ids.device)
        super().commit_kept(replace(kept, features=nothing))

    def propose_tree(self, budget: DraftBudget) -> Draft | None:
        """A tree within the budget; None while no row has new tokens, or where the draft model's context ends."""
        num_new = self.num_unread if self.fixed is None else self._num_waiting
        if self._is_full(num_new):
            return None
        pairs = zip(budget.depths, self._room(num_new), strict=True)
        depths = tuple(max(min(depth, room), 0) for depth, room in pairs)
        if self.fixed is not None:
            return self.propose_fixed(replace(budget, depths=depths))
        if not any(num_new):
            return None
        depths = tuple(depth * (new > 0) for depth, new in zip(depths, num_new, strict=True))
        return self.draft(depths, budget, self.read_unread())

    def _room(self, num_new: Sequence[int]) -> list[int]:
        """Of each row the tokens that fit into the draft model's context behind what is read and what is new."""
        return [self._context - read - new for read, new in zip(self.num_read, num_new, strict=True)]

    def _is_full(self, num_new: Sequence[int]) -> bool:
        """Whether there are new tokens, and those of every row that has some go beyond the draft model's context."""
        rooms = [room for room, new in zip(self._room(num_new), num_new, strict=True) if new]
        return bool(rooms) and max(rooms) < 0

    @property
    def has_unread(self) -> bool:
        """Whether there are tokens that the drafter has not read, and has room for."""
        return super().has_unread and not self._is_full(self.num_unread)

    def why_not_fixed(self, budget: DraftBudget) -> str | None:
        """Why drafts within such budgets cannot be made in fixed shapes, in words; None if they can."""
        if self.drafter.config.backend == "distributed":
            return "processes exchange what layers of the draft model give"
        return super().why_not_fixed(budget) or obstacle_in(self.drafter.model, "draft model")

    @property
    def settings(self) -> Any:
        """How layers are read, and with which fused weights."""
        backend = self._backend
        return type(backend).__name__, repr(backend.groups), backend.version

    def read_unread(self) -> Tensor:
        """Read new tokens: the newest state of each row, `[rows, 1, 1, hidden]`."""
        ids, _, num_new = self.take_pending(padding_side="left")
        positions = self.assign_slots(num_new)
        mask = self.causal_mask(positions)
        return self._read(ids, mask, positions.clamp(min=0), positions[:, :0], is_exact=True)[:, None, -1:]

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:  # noqa: ARG002  they are empty
        """Read the first `num` of `[rows, tokens]` in fixed shapes: the newest state of each row."""
        assert self.fixed is not None  # the caller asked
        steps = torch.arange(token_ids.shape[1], device=num.device)
        positions = self.lengths + steps
        self.fixed.assign_slots(positions, steps < num)
        mask = self.fixed.text_mask(positions, positions)
        return newest_of(self._read(token_ids, mask, positions, positions[:, :0], is_exact=True), num - 1)[:, None]

    def _catch_up(self) -> None:
        """Read the tokens that wait; where the draft model's context has ended, they become the whole history."""
        if self.fixed is not None and self._is_full(self._num_waiting):
            self.fixed.cache.lengths.zero_()
            self.num_read = [0] * len(self.num_read)
        super()._catch_up()

    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:  # noqa: ARG002  others read what parents gave
        """States `[rows, nodes, 1, hidden]` of drafted nodes of one depth, from their tokens and what they see."""
        positions = (self.lengths + number - 1).expand(-1, token_ids.shape[1])
        before = positions[:, :0] if number == 1 else self._draft_positions
        self._draft_positions = torch.cat([before, positions], dim=-1)
        mask = self.draft_mask(seen, positions)
        return self._read(token_ids[..., 0], mask, positions, self._draft_positions, is_exact=False)[:, :, None]

    def _read(self, ids: Tensor, allowed: Tensor, positions: Tensor, drafted: Tensor, is_exact: bool) -> Tensor:
        """States `[rows, tokens, hidden]` of tokens, which see slots of the text and of `drafted` tokens."""
        if self.fixed is None:
            slots = torch.cat([self.slots.positions, drafted], dim=-1)
        else:
            slots = self.fixed.slot_positions(drafted)
        ids = ids.to(self.drafter.device)
        with tree_attention(self.drafter.model):
            return self.drafter.read(ids, allowed, positions, slots, self.cache, self._backend, is_exact)

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of the draft model's own head, over the tokens that both models have."""
        return self.drafter.logits(features)
