"""Drafting with EasySpec: one exact pass over new text, then a tree, one depth a pass, with layers in groups.

The exact pass also reads what was kept of the last draft, whose rough keys and values are dropped: the paper's
calibration (arXiv 2502.02493, section 4.3).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...generation.drafting import Committed, Draft, DraftBudget, TargetView
from ..tree_drafting.grown import GrownTreeGenerator

if TYPE_CHECKING:
    from .modeling_easyspec import LayerParallelDrafter


class LayerParallelCandidateGenerator(GrownTreeGenerator):
    """Drafting with a [`LayerParallelDrafter`] during one call; all rows share the passes, each has its own tree.

    What other generators do with pairs it does with tokens: their features have no width.
    """

    drafter: "LayerParallelDrafter"

    def __init__(
        self, drafter: "LayerParallelDrafter", target: TargetView, max_length: int, rng: torch.Generator
    ) -> None:
        num_shared = drafter.config.draft_vocab_size
        assert num_shared is not None  # filled in
        if num_shared != drafter.config.vocab_size:
            self.draft_token_ids = torch.arange(num_shared, device=drafter.device)
        super().__init__(drafter, target, max_length, rng)
        self._backend = drafter.backend()
        context = getattr(drafter.model.config, "max_position_embeddings", None)
        self._context = max_length if context is None else int(context)
        self._draft_positions = torch.empty(0, dtype=torch.long)  # [rows, draft slots] where drafted tokens stand

    def commit(self, committed: Committed) -> None:
        """Keep the new tokens for the next proposal; at first the whole text."""
        num_new = committed.num_new if self.pending else committed.lengths
        nothing = torch.empty(len(num_new), max(num_new), 0, dtype=torch.float)
        super().commit(replace(committed, num_new=num_new, features=nothing))

    def propose(self, budget: DraftBudget) -> Draft | None:
        """A tree within the budget; None while no row has new tokens, or where the draft model's context ends."""
        num_new = self.num_unread
        max_depths = [
            min(depth, self._context - read - new) * (new > 0)
            for depth, read, new in zip(budget.depths, self.num_read, num_new, strict=True)
        ]
        if all(depth < 0 for depth, new in zip(max_depths, num_new, strict=True) if new):  # nor where nothing is new
            return None
        ids, _, num_new = self.take_pending(padding_side="left")
        is_exact = self.drafter.config.calibrate or not len(self.slots)
        positions = self.assign_slots(num_new)
        self._draft_positions = positions[:, :0]
        states = self._read(ids, self.causal_mask(positions), positions.clamp(min=0), is_exact)[:, -1:]
        return self.draft([max(depth, 0) for depth in max_depths], budget, states[:, None])

    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:  # noqa: ARG002  others read what parents gave
        """States `[rows, nodes, 1, hidden]` of drafted nodes of one depth, from their tokens and what they see."""
        positions = torch.tensor(self.num_read, device=token_ids.device)[:, None] + number - 1
        positions = positions.expand(-1, token_ids.shape[1])
        self._draft_positions = torch.cat([self._draft_positions, positions], dim=-1)
        return self._read(token_ids[..., 0], self.draft_mask(seen), positions, is_exact=False)[:, :, None]

    def _read(self, ids: Tensor, allowed: Tensor, positions: Tensor, is_exact: bool) -> Tensor:
        """States `[rows, tokens, hidden]` of tokens, which see the slots of the text and of the draft."""
        slots = torch.cat([self.slots.positions, self._draft_positions], dim=-1)
        ids = ids.to(self.drafter.device)
        return self.drafter.read(ids, allowed, positions, slots, self.slots.cache, self._backend, is_exact)

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of the draft model's own head, over the tokens that both models have."""
        return self.drafter.logits(features)
