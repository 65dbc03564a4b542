"""Drafting with Eagle: a pass reads the new pairs, then a tree grows or a static one is drafted, a depth a pass."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...generation.cache import HOLE
from ...generation.drafting import Draft, DraftBudget, TargetView
from ..tree_drafting.grown import GrownTreeGenerator

if TYPE_CHECKING:
    from .modeling_eagle import EagleDrafter


class EagleCandidateGenerator(GrownTreeGenerator):
    """Drafting with an [`EagleDrafter`] during one call; all rows share the passes, each has its own tree."""

    drafter: "EagleDrafter"

    def __init__(self, drafter: "EagleDrafter", target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self._draft_token_ids = drafter.draft_token_ids

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the drafter can draft."""
        return self.drafter.config.num_draft_tokens

    def propose(self, budget: DraftBudget) -> Draft | None:
        """A tree within the budget; None while no row has new pairs."""
        ids, features, num_new = self.take_pending(padding_side="left")
        if not any(num_new):
            return None
        states = self._read(ids, features, num_new)
        depths = [depth * (num > 0) for depth, num in zip(budget.depths, num_new, strict=True)]
        return self.draft(depths, budget, states[:, None])

    def _read(self, ids: Tensor, features: Tensor, num_new: list[int]) -> Tensor:
        """Read new pairs, each row's newest one last; the states `[rows, 1, hidden]` after those."""
        positions, mask = self.assign_slots(ids, num_new)
        states = self.drafter.fuse(self.to_drafter(features))
        return self._attend(self.embed(ids), states, mask, positions.clamp(min=0))[:, -1:]

    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:
        """States `[rows, nodes, 1, hidden]` of drafted nodes of one depth, from tokens and parents' states."""
        states = features[:, :, 0].gather(1, parents[..., None].expand(-1, -1, features.shape[-1]))
        positions = torch.tensor(self.num_read, device=states.device)[:, None] + number - 1
        is_held = (self.slots.positions != HOLE)[:, None].expand(-1, seen.shape[1], -1)
        mask = torch.cat([is_held.to(seen.device), seen], dim=-1)
        embeds, fed_back = self.embed(token_ids[..., 0]), self.drafter.fed_back(states)
        return self._attend(embeds, fed_back, mask, positions.expand(-1, states.shape[1]))[:, :, None]

    def _attend(self, token_embeds: Tensor, states: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        return self.drafter.attend(token_embeds, states, mask, positions, self.slots.cache)

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of states: of the drafter's own head where it has one."""
        return self.target.head(features) if self.drafter.config.version == 1 else self.drafter.draft_logits(features)

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """The target's ids of the drafter's."""
        return token_ids if self._draft_token_ids is None else self._draft_token_ids[token_ids]

    def over_target_ids(self, probs: Tensor) -> Tensor:
        """Probabilities over the target's vocabulary; what cannot be drafted has none."""
        if self._draft_token_ids is None:
            return probs
        spread = probs.new_zeros(*probs.shape[:-1], self.drafter.config.vocab_size)
        return spread.index_copy(-1, self._draft_token_ids, probs)

    def over_draft_ids(self, values: Tensor) -> Tensor:
        """Values of the tokens that the drafter can draft."""
        return values if self._draft_token_ids is None else values[..., self._draft_token_ids]
