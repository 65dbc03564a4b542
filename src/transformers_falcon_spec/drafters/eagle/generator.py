"""Drafting with Eagle: a pass reads the new pairs, then a tree grows or a static one is drafted, a depth a pass."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...generation.drafting import Draft, DraftBudget, TargetView
from ..tree_drafting.grown import GrownTreeGenerator

if TYPE_CHECKING:
    from .modeling_eagle import EagleDrafter


class EagleCandidateGenerator(GrownTreeGenerator):
    """Drafting with an [`EagleDrafter`] during one call; all rows share the passes, each has its own tree."""

    drafter: "EagleDrafter"

    def __init__(self, drafter: "EagleDrafter", target: TargetView, max_length: int, rng: torch.Generator) -> None:
        self.draft_token_ids = drafter.draft_token_ids
        super().__init__(drafter, target, max_length, rng)

    def propose(self, budget: DraftBudget) -> Draft | None:
        """A tree within the budget; None while no row has new pairs."""
        ids, features, num_new = self.take_pending(padding_side="left")
        if not any(num_new):
            return None
        positions = self.assign_slots(num_new)
        inputs, mask = self.drafter.fuse(self.to_drafter(features)), self.causal_mask(positions)
        states = self.drafter.attend(self.embed(ids), inputs, mask, positions.clamp(min=0), self.slots.cache)[:, -1:]
        depths = [depth * (num > 0) for depth, num in zip(budget.depths, num_new, strict=True)]
        return self.draft(depths, budget, states[:, None])

    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:
        """States `[rows, nodes, 1, hidden]` of drafted nodes of one depth, from tokens and parents' states."""
        states = features[:, :, 0].gather(1, parents[..., None].expand(-1, -1, features.shape[-1]))
        positions = torch.tensor(self.num_read, device=states.device)[:, None] + number - 1
        embeds, fed_back = self.embed(token_ids[..., 0]), self.drafter.fed_back(states)
        positions = positions.expand(-1, states.shape[1])
        return self.drafter.attend(embeds, fed_back, self.draft_mask(seen), positions, self.slots.cache)[:, :, None]

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of states: of the drafter's own head where it has one."""
        return self.target.head(features) if self.drafter.config.version == 1 else self.drafter.draft_logits(features)
