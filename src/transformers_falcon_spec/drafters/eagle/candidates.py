"""Drafting with Eagle: reads committed pairs in one pass, then grows a tree, or drafts a static one, a depth a pass.

A tree that grows takes the likeliest nodes (arXiv 2406.16858, section 4). Where a rule judges what was drawn, the tree is a static
one: such rules hold for shapes that were settled before the draws, and choosing nodes by what was drawn would bias the text. A
walk that foresees the target's own draws is not biased by any shape, so there trees grow from what is likely under those draws.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.growth import TreeGrowth
from ...errors import OptionError
from ...generation.cache import HOLE, drop_last
from ...generation.candidates import Draft, DraftBudget, TargetView
from ..plan import DraftPass
from ..static_tree import StaticTreeGenerator

if TYPE_CHECKING:
    from .modeling_eagle import EagleDrafter


class EagleCandidateGenerator(StaticTreeGenerator):
    """One call's drafting with an [`EagleDrafter`]; all rows in the same passes, each with its own past and its own tree."""

    drafter: "EagleDrafter"

    def __init__(self, drafter: "EagleDrafter", target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self._tree = drafter.draft_tree
        num_ranks, num_tokens = int(self._tree.ranks.max()) + 1, drafter.config.num_draft_tokens
        if num_ranks > num_tokens:
            raise OptionError(
                f"`draft_tree` asks for the {num_ranks} best tokens of a place, but the drafter knows {num_tokens}. "
                "Take a narrower tree."
            )
        self._draft_token_ids = drafter.draft_token_ids

    def propose(self, budget: DraftBudget) -> Draft | None:
        """A tree within the budget; None while no row has new pairs."""
        ids, features, num_new = self.take_pending(padding_side="left")
        if not any(num_new):
            return None
        states = self._read(ids, features, num_new)
        depths = [depth * (num > 0) for depth, num in zip(budget.depths, num_new, strict=True)]
        is_judged = budget.temperature is not None and budget.noise is None
        if self.drafter.is_tree_dynamic and not is_judged:
            return self._grow(depths, budget, states)
        return self.draft_static(self._tree, depths, budget, states[:, None])

    def _read(self, ids: Tensor, features: Tensor, num_new: list[int]) -> Tensor:
        """Read new pairs, each row's newest one last; the states `[rows, 1, hidden]` after those."""
        self.slots.tidy()
        num_read = torch.tensor(self.num_read, device=ids.device)
        positions = num_read[:, None] + torch.arange(-ids.shape[1], 0, device=ids.device)
        if min(num_new) < ids.shape[1]:
            first = num_read - torch.tensor(num_new, device=ids.device)
            positions = positions.masked_fill(positions < first[:, None], HOLE)
        self.slots.append(positions, num_new)
        places = self.slots.places[:, None]
        mask = (places <= positions[..., None]) & (places != HOLE)
        states = self.drafter.fuse(self.in_place(features))
        return self._attend(self.embed(ids), states, mask, positions.clamp(min=0))[:, -1:]

    def _grow(self, depths: Sequence[int], budget: DraftBudget, states: Tensor) -> Draft:
        """A tree for each row: the likeliest nodes are fed in every pass, and the likeliest of all are kept."""
        config = self.drafter.config
        width = 1 if budget.is_chain else config.tree_top_k
        num_passes = min(config.tree_depth, max(depths))
        if budget.num_passes is not None:
            num_passes = min(num_passes, budget.num_passes)
        growth = TreeGrowth(self.roots, torch.tensor(depths))
        nodes = torch.zeros_like(self.roots)  # fed in this pass; at first the roots, which were read
        seen = torch.zeros(*nodes.shape, 0, dtype=torch.bool, device=nodes.device)  # draft slots that each one sees
        for number in range(num_passes):
            if number:
                start = growth.token_ids.shape[1] - growth.num_newest
                nodes = growth.best_newest(width)
                parents = (nodes - start) // width  # places in the pass before
                states = states.gather(1, parents[..., None].expand(-1, -1, states.shape[-1]))
                own = torch.eye(nodes.shape[1], dtype=torch.bool, device=nodes.device).expand(len(nodes), -1, -1)
                above = seen.gather(1, parents[..., None].expand(-1, -1, seen.shape[-1]))
                seen = torch.cat([above, own], dim=-1)
                states = self._feed(growth.token_ids.gather(1, nodes), states, seen, number)
            best = self._log_chances(self.draft_logits(states), budget, number + 1).topk(width, dim=-1)
            growth.expand(nodes, self.target_ids(best.indices), best.values)
        drop_last(self.slots.cache, seen.shape[-1])
        token_ids, tree = growth.best(min(config.num_tree_nodes, budget.num_nodes))
        return Draft(token_ids, tree.parents, num_passes=num_passes)

    def _log_chances(self, logits: Tensor, budget: DraftBudget, depth: int) -> Tensor:
        """How likely the target is to take each token, `[rows, nodes, tokens]`.

        It will take the best of `probabilities / noise`. If its log-probabilities are the drafter's plus independent Gumbel
        noise, then the chance of a token is its share of the drafter's ratios.
        """
        if budget.noise is None:
            return logits.log_softmax(dim=-1)
        noise = torch.stack([budget.noise(row, depth) for row in range(len(logits))]).to(logits)
        noise = noise if self._draft_token_ids is None else noise[:, self._draft_token_ids]
        return (logits / (budget.temperature or 1.0) - noise.log()[:, None]).log_softmax(dim=-1)

    def draft_level(self, draft_pass: DraftPass, token_ids: Tensor, features: Tensor, number: int) -> Tensor:
        """All nodes of a level in one forward: states `[rows, nodes, 1, hidden]`."""
        seen = draft_pass.tail_mask.expand(len(token_ids), -1, -1)
        states = features[:, draft_pass.parent_blocks, 0]
        return self._feed(token_ids[:, draft_pass.fed_nodes[:, 0]], states, seen, number)[:, :, None]

    def _feed(self, token_ids: Tensor, states: Tensor, seen: Tensor, depth: int) -> Tensor:
        """States `[rows, nodes, hidden]` of drafted nodes of one depth, of their tokens and the states of their parents.

        `seen` `[rows, nodes, draft slots]` says which draft slots each one sees, the new ones included.
        """
        positions = torch.tensor(self.num_read, device=states.device)[:, None] + depth - 1
        is_held = (self.slots.places != HOLE)[:, None].expand(-1, seen.shape[1], -1)
        mask = torch.cat([is_held.to(seen.device), seen], dim=-1)
        fed_back = self.drafter.fed_back(states)
        return self._attend(self.embed(token_ids), fed_back, mask, positions.expand(-1, states.shape[1]))

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
