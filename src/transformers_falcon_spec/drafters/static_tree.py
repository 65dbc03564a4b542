"""Drafting a static tree pass by pass: every place takes the best tokens, or tokens drawn from a distribution that is kept."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.sampling import draw_distinct
from ..core.tree import DraftTree
from ..generation.cache import drop_last
from ..generation.candidates import Draft, DraftBudget
from .pairs import PairGenerator
from .plan import DraftPass, draft_passes


class StaticTreeGenerator(PairGenerator):
    """A generator that drafts trees whose shape is known beforehand, `block_size` tokens a pass."""

    block_size: int = 1

    @abstractmethod
    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:
        """Features `[rows, blocks, k, hidden]` of pass `number`, 1 or more, all its blocks in one forward.

        Keys and values of the blocks stay in the cache until the draft is complete.

        Args:
            token_ids (`torch.Tensor` of shape `(rows, blocks, k)`): Drafted tokens, those of a block each other's path.
            features (`torch.Tensor` of shape `(rows, blocks before, k, hidden)`): Those of the pass before.
            parents (`torch.Tensor` of shape `(rows, blocks)`): The block of the pass before that each one goes on from.
            seen (`torch.Tensor` of shape `(rows, blocks * k, draft slots)`): Which drafted tokens each one sees, of this pass and
                of earlier ones.
            number (`int`): The pass.
        """

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of features, over the tokens that the drafter can draft."""
        return self.target.head(features)

    def target_ids(self, token_ids: Tensor) -> Tensor:
        """The target's ids of the drafter's."""
        return token_ids

    def over_target_ids(self, probs: Tensor) -> Tensor:
        """Probabilities over the tokens of the target, of those over the tokens that the drafter can draft."""
        return probs

    def draft_static(self, tree: DraftTree, depths: Sequence[int], budget: DraftBudget, features: Tensor) -> Draft:
        """`tree` cut to the budget and to `depths` of each row; `features` `[rows, 1, k, hidden]` are those of the first pass."""
        max_depth = min(max(depths), int(tree.depths.max()))
        if budget.num_passes is not None:
            max_depth = min(max_depth, budget.num_passes * self.block_size)
        tree = fitted(tree, max_depth, budget.num_nodes, budget.is_chain)
        passes = draft_passes(tree, self.block_size, self.drafter.device)
        token_ids = self.roots.repeat(1, len(tree))
        num_drafted_slots = 0
        dists: list[Tensor] = []  # [rows, parents, vocab] of each pass
        dist_index = torch.full_like(token_ids[:1], -1)
        for number, draft_pass in enumerate(passes):
            if number:
                num_rows = len(token_ids)
                parents = draft_pass.parent_blocks.expand(num_rows, -1)
                seen = draft_pass.tail_mask.expand(num_rows, -1, -1)
                features = self.draft_blocks(token_ids[:, draft_pass.fed_nodes], features, parents, seen, number)
                num_drafted_slots += draft_pass.fed_nodes.numel()
            logits = self.draft_logits(features)
            if budget.temperature is None:
                best = logits.topk(draft_pass.num_ranks, dim=-1).indices  # [rows, blocks, k, ranks]
                found = self.target_ids(best[(slice(None), *draft_pass.sources)])
            else:
                probs, found = self._drawn(draft_pass, logits, budget, number)
                if budget.noise is None:
                    num_dists = sum(dist.shape[1] for dist in dists)
                    places = torch.arange(num_dists, num_dists + probs.shape[1], device=dist_index.device)
                    dist_index[0, draft_pass.parents] = places
                    dists.append(probs)
            token_ids[:, draft_pass.nodes] = found.to(token_ids.device)
        drop_last(self.slots.cache, num_drafted_slots)
        drawn: dict[str, Any] = {"draft_probs": torch.cat(dists, dim=1), "dist_index": dist_index} if dists else {}
        return Draft(token_ids, parents_by_row(tree, depths).to(token_ids.device), num_passes=len(passes), **drawn)

    def _drawn(self, draft_pass: DraftPass, logits: Tensor, budget: DraftBudget, number: int) -> tuple[Tensor, Tensor]:
        """Distributions `[rows, parents, vocab]` of the parents' children, and the drawn tokens `[rows, drafted]`."""
        assert budget.temperature is not None  # the caller asked
        probs = torch.softmax(logits[(slice(None), *draft_pass.lists)] / budget.temperature, dim=-1)
        probs = self.over_target_ids(probs)
        depths = (draft_pass.lists[1] + number * self.block_size + 1).tolist()
        num_children = int(draft_pass.siblings[1].max()) + 1
        children = draw_children(probs, depths, num_children, budget, self.rng)
        return probs, children[(slice(None), *draft_pass.siblings)]


def tree_from_json(value: dict[str, Any]) -> DraftTree:
    """A stored tree; the same object for the same tree, so that what is planned for it is planned once and not for every call."""
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
    """Distinct tokens `[rows, parents, num_children]`, drawn one after the other from `probs` `[rows, parents, vocab]`.

    Each parent draws anew, unless the budget brings noise: then that of `depths`, where the children of each parent stand.
    """
    if budget.noise is None:
        noise = torch.empty(probs.shape).exponential_(generator=rng).to(probs.device)
    else:
        noises = [budget.noise(row, depth) for row in range(len(probs)) for depth in depths]
        noise = torch.stack(noises).reshape(probs.shape).to(probs.device)
    children = draw_distinct(probs.flatten(0, 1), noise.flatten(0, 1), num_children)
    return children.reshape(*probs.shape[:2], -1)
