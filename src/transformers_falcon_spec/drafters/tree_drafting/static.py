"""Drafting of a static tree, pass by pass: nodes take the best tokens, or tokens drawn for rejection sampling."""

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.sampling import draw_distinct
from ...core.tree import DraftTree
from ...generation.drafting import Draft, DraftBudget
from .fixed import FixedDraft, FixedPairs
from .pairs import PairGenerator
from .plan import DraftPass, draft_passes


@dataclass
class FilledTree:
    """The tokens of a tree's nodes, and what they were chosen by where that is wanted."""

    token_ids: Tensor  # [rows, nodes]
    dist_index: Tensor  # [1, nodes] which of `dists`, side by side, the children of a node were drawn from; -1 = none
    dists: list[Tensor] = field(default_factory=list)  # [rows, parents, vocab] of each part of a pass
    node_probs: Tensor | None = None  # [rows, nodes]


class StaticTreeGenerator(PairGenerator):
    """A generator that drafts trees whose shape is known beforehand, `block_size` tokens a pass."""

    tree: DraftTree
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

    def prepare(self, features: Tensor) -> Tensor:
        """Of features `[rows, blocks, k, hidden]` what [`change_after`] needs of them, computed once."""
        raise NotImplementedError

    def change_after(self, token_ids: Tensor, prepared: Tensor) -> Tensor:
        """What nodes change in the logits after them: `[rows, nodes, tokens]`.

        Of each node `token_ids` `[rows, nodes, offset + 1]` has the tokens of its block up to itself, after the one
        that the block follows; `prepared` `[rows, nodes, ...]` is that of its block at the next offset.
        """
        raise NotImplementedError

    def logits_after(self, token_ids: Tensor, logits: Tensor, prepared: Tensor, blocks: Tensor) -> Tensor:
        """Logits `[rows, nodes, tokens]` after nodes, from `logits` and `prepared` of all `blocks` at one offset."""
        lists = of_blocks(logits, blocks)  # numbers are added as they are, the sum has the wider type
        return lists + self.change_after(token_ids, of_blocks(prepared, blocks).expand(*blocks.shape, -1))

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of features, over the tokens that the drafter can draft."""
        return self.target.head(features)

    @property
    def num_draftable_tokens(self) -> int:
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
        tree = self.within(tree, max(depths), budget)
        passes = draft_passes(tree, self.block_size, self.drafter.device)
        filled = self.fill(passes, len(tree), budget, features)
        by_row = parents_by_row(tree, depths).to(filled.token_ids.device)
        drawn: dict[str, Any] = {}
        if filled.dists:
            drawn = {"draft_probs": torch.cat(filled.dists, dim=1), "dist_index": filled.dist_index}
        return Draft(filled.token_ids, by_row, num_passes=len(passes), node_probs=filled.node_probs, **drawn)

    def within(self, tree: DraftTree, max_depth: int, budget: DraftBudget) -> DraftTree:
        """The part of `tree` above `max_depth` that the budget allows, whatever it says of rows."""
        max_depth = min(max_depth, int(tree.depths.max()))
        if budget.num_passes is not None:
            max_depth = min(max_depth, budget.num_passes * self.block_size)
        return fitted(tree, max_depth, budget.num_nodes, budget.is_chain)

    def fill(self, passes: Sequence[DraftPass], num_nodes: int, budget: DraftBudget, features: Tensor) -> FilledTree:
        """The tokens of a tree's nodes, pass by pass, from features `[rows, 1, k, hidden]` of the first one."""
        token_ids = self.roots.repeat(1, num_nodes)
        filled = FilledTree(token_ids, torch.full_like(token_ids[:1], -1))
        if budget.wants_node_probs:
            filled.node_probs = torch.ones(token_ids.shape, dtype=torch.float)
        for number, draft_pass in enumerate(passes):
            if number:
                parents = draft_pass.parent_blocks.expand(len(token_ids), -1)
                seen = draft_pass.tail_mask.expand(len(token_ids), -1, -1)
                features = self.draft_blocks(token_ids[:, draft_pass.fed_nodes], features, parents, seen, number)
            logits = self.draft_logits(features)
            parts = (draft_pass,) if self.predicts_independently else draft_pass.by_block_offset
            prepared = features if self.predicts_independently else self.prepare(features)
            for offset, part in enumerate(parts):
                self._fill_part(filled, part, budget, (part, offset, logits, prepared, token_ids))
        self.forget_drafted()
        return filled

    @property
    def num_draft_slots(self) -> int:
        """The most tokens that are fed to draft a tree."""
        passes = draft_passes(self.tree, self.block_size, self.drafter.device)
        return sum(draft_pass.fed_nodes.numel() for draft_pass in passes[1:])

    def carried(self) -> dict[str, Tensor]:
        """The list of tokens that can be drafted, which is made for a call."""
        return {} if self.draft_token_ids is None else {"draft_token_ids": self.draft_token_ids}

    def enter_fixed(self, num_slots: int, most_kept: int, buffers: Any = None) -> FixedPairs:
        """Read what waits, move all that is known of the text to buffers, and go on in them."""
        fixed = super().enter_fixed(num_slots, most_kept, buffers)
        self.draft_token_ids = fixed.carried.get("draft_token_ids")
        return fixed

    def first_features(self, tree: DraftTree) -> Tensor:  # noqa: ARG002  a subclass needs it
        """Features `[rows, 1, k, hidden]` of the first pass over `tree`, from the buffers."""
        assert self.fixed is not None  # the caller asked
        return self.fixed.first

    def max_depths(self) -> Tensor:
        """The depth `[rows, 1]` that each row's tree may have, from the buffers."""
        assert self.fixed is not None  # the caller asked
        return self.fixed.limits * (self.lengths >= self.least_pairs)

    def draft_fixed(self, budget: DraftBudget, shown: int) -> Draft:
        """The static tree, cut to all of the budget but the depths of rows: nodes below these belong to nobody."""
        assert self.fixed is not None  # the caller asked
        tree, device = self.within(self.tree, len(self.tree), budget), self.drafter.device
        passes, depth = draft_passes(tree, self.block_size, device), int(tree.depths.max())
        fixed_noise, draws = drawn_ahead(budget, len(self.num_read), depth)
        draft = self.fixed.draft(("static", tree, draws), len(tree))
        known = draft.constants
        if not known:
            known |= {"passes": passes, "parents": tree.parents.to(device), "depths": tree.depths.to(device)}

        def work() -> None:
            filled = self.fill(known["passes"], len(tree), fixed_noise, self.first_features(tree))
            draft.token_ids.copy_(filled.token_ids)
            draft.parents.copy_(known["parents"].where(known["depths"] <= self.max_depths(), -1))

        return self.filled(draft, depth, budget, shown, work)

    def filled(
        self, draft: FixedDraft, depth: int, budget: DraftBudget, shown: int, work: Callable[[], None]
    ) -> Draft:
        """What `work` writes to the buffers `draft`: trees of `depth` at most, or less where the budget gives less."""
        assert self.fixed is not None  # the caller asked
        depths = tuple(min(limit, depth) for limit in budget.depths)
        self.fixed.limit(depths)
        self.fixed.fill(draft, shown, work)
        num_passes = -(-depth // self.block_size)
        return Draft(draft.token_ids, draft.parents, num_passes=num_passes, max_depth=max(depths))

    def _fill_part(self, filled: FilledTree, part: DraftPass, budget: DraftBudget, inputs: Any) -> None:
        """The tokens of one part of a pass, and what else is wanted of them."""
        is_drawn = budget.temperature is not None
        if is_drawn or filled.node_probs is not None:
            probs = self._probs(self._lists(*inputs), budget)
        found = self._drawn(part, probs, budget) if is_drawn else self._best(*inputs)
        filled.token_ids[:, part.nodes] = found.to(filled.token_ids.device)
        if is_drawn and budget.noise is None:
            indices = torch.arange(len(part.parents), device=filled.dist_index.device)
            filled.dist_index[0, part.parents] = indices + sum(dist.shape[1] for dist in filled.dists)
            filled.dists.append(probs)
        if filled.node_probs is not None:
            likely = probs_of_nodes(probs, found, part.siblings[0], part.depths, budget)
            filled.node_probs[:, part.nodes.cpu()] = likely

    def _lists(self, part: DraftPass, offset: int, logits: Tensor, prepared: Tensor, token_ids: Tensor) -> Tensor:
        """Logits `[rows, parents, tokens]` of the parents' children, which stand at `offset` in their blocks."""
        blocks, offsets = part.lists
        if self.predicts_independently:
            return logits[:, blocks, offsets]
        by_row = blocks.expand(len(token_ids), -1)
        return self.logits_after(token_ids[:, part.paths], logits[:, :, offset], prepared[:, :, offset], by_row)

    def _best(self, part: DraftPass, offset: int, logits: Tensor, prepared: Tensor, token_ids: Tensor) -> Tensor:
        """The drafted tokens `[rows, drafted]`: the best of each list."""
        blocks, offsets, ranks = part.sources
        if self.predicts_independently:  # nodes of one offset share its list
            return self.target_ids(logits.topk(part.num_ranks, dim=-1).indices[:, blocks, offsets, ranks])
        lists = self._lists(part, offset, logits, prepared, token_ids)
        return self.target_ids(lists.topk(part.num_ranks, dim=-1).indices[:, part.siblings[0], ranks])

    def _drawn(self, part: DraftPass, probs: Tensor, budget: DraftBudget) -> Tensor:
        """The drafted tokens `[rows, drafted]`, drawn from `probs` `[rows, parents, vocab]`."""
        parents, indices = part.siblings
        return draw_children(probs, part.depths, part.num_siblings, budget, self.rng)[:, parents, indices]

    def _probs(self, lists: Tensor, budget: DraftBudget) -> Tensor:
        """Distributions over the target's tokens, of the parents' logits."""
        return self.over_target_ids(torch.softmax(lists / (budget.temperature or 1.0), dim=-1))


def of_blocks(lists: Tensor, blocks: Tensor) -> Tensor:
    """Of `[rows, blocks, numbers]` those of each node's block `[rows, nodes]`; with one block they are all alike."""
    return lists if lists.shape[1] == 1 else lists.gather(1, blocks[..., None].expand(-1, -1, lists.shape[-1]))


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


def drawn_ahead(budget: DraftBudget, num_rows: int, depth: int) -> tuple[DraftBudget, Any]:
    """The budget with the noise of all draws down to `depth` in place, and what work on it holds of the draws."""
    if budget.noise is None:
        return budget, None
    noises = {(row, at): budget.noise(row, at) for row in range(num_rows) for at in range(1, depth + 1)}
    places = (budget.temperature, *(noise.data_ptr() for noise in noises.values()))
    return replace(budget, noise=lambda row, at: noises[row, at]), places


def parents_by_row(tree: DraftTree, depths: Sequence[int]) -> Tensor:
    """Parents `[1 or rows, nodes]`: nodes deeper than a row's limit belong to nobody."""
    if min(depths) >= int(tree.depths.max()):
        return tree.parents
    return tree.parents.where(tree.depths <= torch.tensor(depths)[:, None], -1)


def draw_children(
    probs: Tensor, depths: Sequence[int], num_children: int, budget: DraftBudget, rng: torch.Generator
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


def probs_of_nodes(
    probs: Tensor, found: Tensor, parents: Tensor, depths: Sequence[int], budget: DraftBudget
) -> Tensor:
    """Probability that the target takes each token of `found` `[rows, nodes]`, by `probs` `[rows, parents, vocab]`.

    `parents` `[nodes]` are indices into `probs`. Noise of the budget is taken into account, as in grown trees.
    """
    noise = _coming_noise(probs, depths, budget)
    weights = probs if noise is None else probs / noise
    likely = weights / weights.sum(dim=-1, keepdim=True)
    return likely[:, parents].gather(-1, found.to(probs.device)[..., None]).squeeze(-1).float().cpu()


def _coming_noise(probs: Tensor, depths: Sequence[int], budget: DraftBudget) -> Tensor | None:
    if budget.noise is None:
        return None
    noises = [budget.noise(row, depth) for row in range(len(probs)) for depth in depths]
    return torch.stack(noises).reshape(probs.shape).to(probs.device)
