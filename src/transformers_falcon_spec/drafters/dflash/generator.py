"""Drafting with DFlash: a block of masks reads the new features and all text, and nodes of a depth share a slot.

Position p of the text holds the target's features of token p; the block begins with the newest token, which the target
has not read yet. Between steps the cache keeps keys and values of features alone.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache

from ...generation.cache import HOLE
from ...generation.drafting import Draft, DraftBudget, TargetView
from ..tree_drafting.grown import GrownTreeGenerator
from .configuration_dflash import LAYER_TYPES

if TYPE_CHECKING:
    from .modeling_dflash import DFlashDrafter


class DFlashCandidateGenerator(GrownTreeGenerator):
    """One call's drafting with a [`DFlashDrafter`], in one pass; all rows together, each with its own past."""

    drafter: "DFlashDrafter"
    can_be_fixed = True

    def __init__(self, drafter: "DFlashDrafter", target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self.block_size = drafter.block_size
        self.predicts_independently = drafter.candidate_selector is None

    def propose_tree(self, budget: DraftBudget) -> Draft | None:
        """Draft a tree within the budget; None while no row has new features."""
        if self.fixed is not None:
            return self.propose_fixed(budget)
        if not any(self.num_unread):
            return None
        depths = [depth * (num > 0) for depth, num in zip(budget.depths, self.num_unread, strict=True)]
        return self.draft(depths, budget, self.read_unread())

    def read_unread(self) -> Tensor:
        """Read new features, and fill in a block behind them: `[rows, 1, slots, hidden]`."""
        _ids, features, num_new = self.take_pending(padding_side="left")
        context = self.assign_slots(num_new)
        block = self.lengths + torch.arange(self.block_size + 1, device=context.device)
        held = torch.cat([self.slots.positions, block], dim=-1)
        outputs = self._fill_in(features, context.clamp(min=0), block, held, self.slots.cache)
        self.slots.forget_drafted()
        return outputs[:, None]

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:  # noqa: ARG002  slots see features
        """[`DFlashCandidateGenerator.read_unread`] of the first `num` features in fixed shapes."""
        assert self.fixed is not None  # the caller asked
        fixed, steps = self.fixed, torch.arange(features.shape[1], device=num.device)
        context, slots = self.lengths + steps, torch.arange(self.block_size + 1, device=num.device)
        fixed.assign_slots(context, steps < num)
        fixed.cache.view.slots = torch.cat([fixed.cache.view.slots, slots.expand(len(num), -1)], dim=-1)
        block = self.lengths + num + slots
        held = fixed.slot_positions(block)
        is_block = torch.arange(held.shape[1], device=num.device) < len(slots)
        is_text = functional.pad(torch.ones_like(held[:, fixed.num_before :], dtype=torch.bool), (fixed.num_before, 0))
        is_held = is_block | (is_text & (held < block[:, :1]))
        return self._fill_in(features, context, block, held.where(is_held, HOLE), fixed.cache)[:, None]

    def _fill_in(self, features: Tensor, context: Tensor, block: Tensor, held: Tensor, cache: Cache) -> Tensor:
        """What the drafter gives at the masks of a block at positions `block` `[rows, tokens]`.

        `context` `[rows, features]` are the positions of the features, `held` `[rows, slots]` those of all slots that
        the cache will hold, the block's included.
        """
        masks = torch.full_like(block[:, 1:], self.drafter.config.mask_token_id)
        noise = torch.cat([self.roots, masks], dim=-1)
        positions = torch.cat([context, block], dim=-1)
        states: Tensor = self.run(
            "fill_in", self._embedded(noise), self.to_drafter(features), *self._seen(block, held), positions, cache
        )
        return states

    def _embedded(self, token_ids: Tensor) -> Tensor:
        scale = self.drafter.config.input_embedding_scale
        return self.embed(token_ids) if scale == 1 else self.embed(token_ids) * scale

    def _seen(self, block: Tensor, held: Tensor) -> list[Tensor]:
        """For each of `LAYER_TYPES` the slots `[rows, tokens, slots]` that each token of a block sees."""
        config, distance = self.drafter.config, held[:, None] - block[..., None]
        is_held = (held != HOLE)[:, None].expand_as(distance)
        seen = [is_held, is_held & (distance.abs() <= config.sliding_window)]
        causal = config.causal_layer_types or ()
        return [
            each & (distance <= 0) if name in causal else each for name, each in zip(LAYER_TYPES, seen, strict=True)
        ]

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of the target's head alone, scaled as the drafter and not as the target does, as in training.

        Where a selector chooses among the best tokens of a mask, only those can be drafted.
        """
        config, logits = self.drafter.config, self.target.head(features, is_scaled=False)
        if config.output_multiplier != 1:
            logits = logits * config.output_multiplier
        if config.final_logit_softcapping is not None:
            logits = (logits / config.final_logit_softcapping).tanh() * config.final_logit_softcapping
        if self.predicts_independently:
            return logits
        assert config.selector_top_k is not None  # the configuration has it where it has a selector
        best = logits.topk(config.selector_top_k, dim=-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, best.indices, best.values)

    def prepare(self, features: Tensor) -> Tensor:
        """What the selector reads of the states at the masks."""
        assert self.drafter.candidate_selector is not None  # else slots are independent
        projected: Tensor = self.drafter.candidate_selector.hidden_projection(self.to_drafter(features))
        return projected

    def change_after(self, token_ids: Tensor, prepared: Tensor) -> Tensor:
        """What the selector says of the token before."""
        assert self.drafter.candidate_selector is not None  # as above
        scores: Tensor = self.drafter.candidate_selector(token_ids[..., -1], prepared)
        return scores

    @property
    def num_draft_slots(self) -> int:
        """The tokens of a block."""
        return self.block_size + 1
