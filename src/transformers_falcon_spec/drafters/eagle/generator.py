"""Drafting with Eagle: a pass reads the new pairs, then a tree grows or a static one is drafted, a depth a pass."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...generation.drafting import Draft, DraftBudget, TargetView
from ..tree_drafting.fixed import newest_of
from ..tree_drafting.grown import GrownTreeGenerator

if TYPE_CHECKING:
    from .modeling_eagle import EagleDrafter


class EagleCandidateGenerator(GrownTreeGenerator):
    """Drafting with an [`EagleDrafter`] during one call; all rows share the passes, each has its own tree."""

    drafter: "EagleDrafter"
    can_be_fixed = True

    def __init__(self, drafter: "EagleDrafter", target: TargetView, max_length: int, rng: torch.Generator) -> None:
        self.draft_token_ids = drafter.draft_token_ids
        super().__init__(drafter, target, max_length, rng)

    def propose_tree(self, budget: DraftBudget) -> Draft | None:
        """A tree within the budget; None while no row has new pairs."""
        if self.fixed is not None:
            return self.propose_fixed(budget)
        if not any(self.num_unread):
            return None
        features = self.read_unread()
        rows = zip(budget.depths, self.pending, strict=True)
        return self.draft([depth * (pending.num_taken > 0) for depth, pending in rows], budget, features)

    def read_unread(self) -> Tensor:
        """Read new pairs: the newest state of each row, `[rows, 1, 1, hidden]`."""
        ids, features, num_new = self.take_pending(padding_side="left", most=self.reach)
        positions = self.assign_slots(num_new)
        inputs, mask = self.drafter.fuse(self.to_drafter(features)), self.causal_mask(positions)
        states = self.drafter.attend(self.embed(ids), inputs, mask, positions.clamp(min=0), self.slots.cache)
        return states[:, None, -1:]

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:
        """Read the first `num` of `[rows, pairs]` in fixed shapes: the newest state of each row."""
        assert self.fixed is not None  # the caller asked
        steps = torch.arange(token_ids.shape[1], device=num.device)
        positions = self.lengths + steps
        self.fixed.assign_slots(positions, steps < num)
        inputs, mask = self.run("fuse", self.to_drafter(features)), self.fixed.text_mask(positions, positions)
        states = self.run("attend", self.embed(token_ids), inputs, mask, positions, self.fixed.cache)
        return newest_of(states, num - 1)[:, None]

    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:
        """States `[rows, nodes, 1, hidden]` of drafted nodes of one depth, from tokens and parents' states."""
        states = features[:, :, 0].gather(1, parents[..., None].expand(-1, -1, features.shape[-1]))
        positions = self.lengths + number - 1
        embeds, fed_back = self.embed(token_ids[..., 0]), self.run("fed_back", states)
        positions = positions.expand(-1, states.shape[1])
        states = self.run("attend", embeds, fed_back, self.draft_mask(seen, positions), positions, self.cache)
        return states[:, :, None]

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of states: of the drafter's own head where it has one."""
        return self.target.head(features) if self.drafter.config.version == 1 else self.run("draft_logits", features)
