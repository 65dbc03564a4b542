"""Drafting of a static tree, pass by pass: nodes take the best tokens, or tokens drawn for rejection sampling."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.sampling import draw_distinct
from ...core.tree import DraftTree
from ...generation.drafting import Draft, DraftBudget
from .pairs import PairGenerator
from .plan import DraftPass, draft_passes


class StaticTreeGenerator(PairGenerator):
    """A generator that drafts trees whose shape is known beforehand, `block_size` tokens a pass."""

    block_size: int = 1
    predicts_independently: bool = True  # tokens of a block, without regard to those that stand before them in it
    draft_token_ids: Tensor | None = None  # the target's id of each token that can be drafted; None: all, as they are

    @abstractmethod
    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:
        """Features `[rows, blocks, k, hidden]` of pass `number`, 1 or more, all its blocks in one forward.

        Of the tokens `[rows, blocks, k]` each block continues the block of the pass before that `parents`
        `[rows, blocks]` names, from whose `features` it is drafted, and sees the drafted tokens `seen`
        `[rows, blocks * k, draft slots]`. Keys and values stay in the cache until the draft is complete.
        """

    def logits_after(self, token_ids: Tensor, logits: Tensor, features: Tensor, blocks: Tensor) -> Tensor:
        """Logits `[rows, nodes, tokens]` after nodes, from `logits` and `features` of their `blocks` at one offset."""
        raise NotImplementedError

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of features, over the tokens that the drafter can draft."""
        return self.target.head(features)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the drafter can draft."""
        return self.target.vocab_size if self.draft_token_ids is None else len(self.draft_token_ids)

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """The target's ids of the drafter's."""
        return token_ids if self.draft_token_ids is None else self.draft_token_ids.to(token_ids.device)[token_ids]

    def over_target_ids(self, probs: Tensor) -> Tensor:
        """Probabilities over the target's tokens; what cannot be drafted has none."""
        if self.draft_token_ids is None:
            return probs
        spread = probs.new_zeros(*probs.shape[:-1], self.target.vocab_size)
        return spread.index_copy(-1, self.draft_token_ids.to(probs.device), probs)

    def draft_static(self, tree: DraftTree, depths: Sequence[int], budget: DraftBudget, features: Tensor) -> Draft:
        """`tree` cut to the budget and each row's depth, from features `[rows, 1, k, hidden]` of the first pass."""
        max_depth = min(max(depths), int(tree.depths.max()))
        if budget.num_passes is not None:
            max_depth = min(max_depth, budget.num_passes * self.block_size)
        tree = fitted(tree, max_depth, budget.num_nodes, budget.is_chain)
        passes = draft_passes(tree, self.block_size, self.drafter.device)
        token_ids = self.roots.repeat(1, len(tree))
        dists: list[Tensor] = []  # [rows, parents, vocab] of each pass
        is_drawn = budget.temperature is not None
        dist_index = torch.full_like(token_ids[:1], -1)
        node_probs = torch.ones(token_ids.shape, dtype=torch.float) if budget.wants_node_probs else None
        for number, draft_pass in enumerate(passes):
            if number:
                parents = draft_pass.parent_blocks.expand(len(token_ids), -1)
                seen = draft_pass.tail_mask.expand(len(token_ids), -1, -1)
                features = self.draft_blocks(token_ids[:, draft_pass.fed_nodes], features, parents, seen, number)
            logits = self.draft_logits(features)
            parts = (draft_pass,) if self.predicts_independently else draft_pass.by_block_offset
            for offset, part in enumerate(parts):
                inputs = (part, offset, logits, features, token_ids)
                if is_drawn or node_probs is not None:
                    probs = self._probs(self._lists(*inputs), budget)
                    below = (tree.depths[0, part.parents.cpu()] + 1).tolist()
                found = self._drawn(part, probs, below, budget) if is_drawn else self._best(*inputs)
                token_ids[:, part.nodes] = found.to(token_ids.device)
                if is_drawn and budget.noise is None:
                    indices = torch.arange(len(part.parents), device=dist_index.device)
                    dist_index[0, part.parents] = indices + sum(dist.shape[1] for dist in dists)
                    dists.append(probs)
                if node_probs is not None:
                    likely = probs_of_nodes(probs, found, part.siblings[0], below, budget)
                    node_probs[:, part.nodes.cpu()] = likely
        self.slots.forget_drafted()
        drawn: dict[str, Any] = {"draft_probs": torch.cat(dists, dim=1), "dist_index": dist_index} if dists else {}
        by_row = parents_by_row(tree, depths).to(token_ids.device)
        return Draft(token_ids, by_row, num_passes=len(passes), node_probs=node_probs, **drawn)

    def _lists(self, part: DraftPass, offset: int, logits: Tensor, features: Tensor, token_ids: Tensor) -> Tensor:
        """Logits `[rows, parents, tokens]` of the parents' children, which stand at `offset` in their blocks."""
        blocks, offsets = part.lists
        if self.predicts_independently:
            return logits[:, blocks, offsets]
        parents = token_ids[:, part.parents]
        return self.logits_after(parents, logits[:, :, offset], features[:, :, offset], blocks.expand_as(parents))

    def _best(self, part: DraftPass, offset: int, logits: Tensor, features: Tensor, token_ids: Tensor) -> Tensor:
        """The drafted tokens `[rows, drafted]`: the best of each list."""
        blocks, offsets, ranks = part.sources
        if self.predicts_independently:  # nodes of one offset share its list
            return self.target_ids(logits.topk(part.num_ranks, dim=-1).indices[:, blocks, offsets, ranks])
        lists = self._lists(part, offset, logits, features, token_ids)
        return self.target_ids(lists.topk(part.num_ranks, dim=-1).indices[:, part.siblings[0], ranks])

    def _drawn(self, part: DraftPass, probs: Tensor, depths: list[int], budget: DraftBudget) -> Tensor:
        """The drafted tokens `[rows, drafted]`, drawn from `probs` `[rows, parents, vocab]`."""
        parents, indices = part.siblings
        return draw_children(probs, depths, int(indices.max()) + 1, budget, self.rng)[:, parents, indices]

    def _probs(self, lists: Tensor, budget: DraftBudget) -> Tensor:
        """Distributions over the target's tokens, of the parents' logits."""
        return self.over_target_ids(torch.softmax(lists / (budget.temperature or 1.0), dim=-1))


def tree_from_json(value: dict[str, Any]) -> DraftTree:
    """A stored tree; equal trees are one object, so that passes are planned once and not for every call."""
    return _tree(json.dumps(value))


@lru_cache(maxsize=64)
def _tree(text: str) -> DraftTree:
    return DraftTree.from_json(json.loads(text))


@lru_cache(maxsize=256)
def fitted(tree: DraftTree, max_depth: int, num_nodes: int, is_chain: bool) -> DraftTree:
    """The part of `tree` within the limits; the tree itself where all of it is."""
    if max_depth >= int(tree.depths.max()) and num_nodes >= len(tree) and not is_chain:
        return tree
    return tree.pruned(max_depth, num_nodes, is_chain)


def parents_by_row(tree: DraftTree, depths: Sequence[int]) -> Tensor:
    """Parents `[1 or rows, nodes]`: nodes deeper than a row's limit belong to nobody."""
    if min(depths) >= int(tree.depths.max()):
        return tree.parents
    return tree.parents.where(tree.depths <= torch.tensor(depths)[:, None], -1)


def draw_children(
    probs: Tensor, depths: list[int], num_children: int, budget: DraftBudget, rng: torch.Generator
) -> Tensor:
    """Distinct tokens `[rows, parents, num_children]`, drawn in turn from `probs` `[rows, parents, vocab]`.

    Each parent draws anew, unless the budget brings noise: then that of `depths`, where the children of each parent
    stand. Where fewer tokens than children have probability, the last children have none.
    """
    noise = _coming_noise(probs, depths, budget)
    if noise is None:  # in float64 no quotient becomes 0, so that draws are from `probs` however small a part of it is
        noise = torch.empty(probs.shape, dtype=torch.double, device=rng.device).exponential_(generator=rng)
        probs = probs.to(noise.device)
    children = draw_distinct(probs.flatten(0, 1), noise.flatten(0, 1), num_children)
    return children.reshape(*probs.shape[:2], -1)


def probs_of_nodes(probs: Tensor, found: Tensor, parents: Tensor, depths: list[int], budget: DraftBudget) -> Tensor:
    """Probability that the target takes each token of `found` `[rows, nodes]`, by `probs` `[rows, parents, vocab]`.

    `parents` `[nodes]` are indices into `probs`. Noise of the budget is taken into account, as in grown trees.
    """
    noise = _coming_noise(probs, depths, budget)
    weights = probs if noise is None else probs / noise
    likely = weights / weights.sum(dim=-1, keepdim=True)
    return likely[:, parents].gather(-1, found.to(probs.device)[..., None]).squeeze(-1).float().cpu()


def _coming_noise(probs: Tensor, depths: list[int], budget: DraftBudget) -> Tensor | None:
    if budget.noise is None:
        return None
    noises = [budget.noise(row, depth) for row in range(len(probs)) for depth in depths]
    return torch.stack(noises).reshape(probs.shape).to(probs.device)
