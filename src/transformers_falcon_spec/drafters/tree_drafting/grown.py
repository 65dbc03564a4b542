"""Drafting trees that grow: in every pass the likeliest blocks are fed, and of all nodes the likeliest are kept.

Token matching follows the target's own tokens, so any tree will do for it. Where drawn tokens are compared with their
probabilities the tree is static, for choosing nodes by what was drawn would bias the text. Source: arXiv 2406.16858,
section 4, there with blocks of one token.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...core.tree import DraftTree
from ...core.tree_growth import Children, TreeGrowth
from ...errors import OptionError
from ...generation.drafting import Draft, DraftBudget, TargetView
from ..base import DrafterModel
from .pairs import gives_probs
from .repeated_text import NGRAM_SIZE, RepeatedText
from .static import drawn_ahead, tree_from_json
from .temperatures import block_temperatures
from .text_branch import TextBranchGenerator

LEAST_BLOCKS = 2  # fed in a later pass where there are so many; `LOG.md` says what the second one brings
PASSES_THAT_MAY_PAY = 3  # times the usual depth, where passes are paid for


class GrowingDrafter(DrafterModel):
    """A drafter of one token a pass, whose trees grow unless the options say otherwise."""

    can_grow_trees = True
    grows_trees = True
    default_depth: ClassVar[int]
    can_repeat_text = True

    @property
    def draft_tree(self) -> DraftTree:
        """The static tree: that of `generation_config`, else of the config, else a chain of `tree_depth` tokens."""
        return tree_from_json(self.stored_tree or DraftTree.chain(self.tree_depth).to_json())

    @property
    def tree_depth(self) -> int:
        """How deep trees grow; a pass for each token."""
        return self.generation_config.tree_depth or self.default_depth

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft, root included."""
        num_grown = self.generation_config.num_tree_nodes * self.is_tree_dynamic
        return max(num_grown, len(self.draft_tree)) + self.num_text_tokens


class GrownTreeGenerator(TextBranchGenerator):
    """A generator that grows a tree for each row, or drafts a static one, `block_size` tokens a pass."""

    def __init__(self, drafter: Any, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self.tree: DraftTree = drafter.draft_tree
        self.constants: dict[Any, Any] = {}  # made of the host's numbers once
        if drafter.num_text_tokens:
            num_matching = drafter.generation_config.max_matching_ngram_size or NGRAM_SIZE
            self.text = RepeatedText(drafter.num_text_tokens, num_matching)
        num_ranks = max(int(self.tree.ranks.max()) + 1, drafter.generation_config.tree_top_k * drafter.is_tree_dynamic)
        if num_ranks > self.num_draftable_tokens:
            raise OptionError(
                f"`draft_tree` and `tree_top_k` ask for the {num_ranks} best tokens of a position, but the drafter "
                f"knows {self.num_draftable_tokens}. Take a narrower tree."
            )

    def draft(self, depths: Sequence[int], budget: DraftBudget, features: Tensor) -> Draft:
        """A tree within the budget and each row's depth, from features `[rows, 1, k, hidden]` of the first pass."""
        if self.drafter.is_tree_dynamic and budget.allows_grown_trees and not gives_probs(budget):
            deepest = self._deepest(budget)
            growth = TreeGrowth(self.roots, torch.tensor(depths).clamp(max=deepest))
            return self._grow(growth, min(deepest, max(depths)), budget, features)
        return self.draft_static(self.tree, depths, budget, features)

    @property
    def num_draft_slots(self) -> int:
        """The most tokens that are fed to draft a tree."""
        num_static = super().num_draft_slots
        if not self.drafter.is_tree_dynamic:
            return num_static
        width = min(self.drafter.generation_config.tree_top_k, self.num_draftable_tokens)
        num_passes = -(-self.drafter.tree_depth // self.block_size)
        return max(num_static, (num_passes - 1) * num_fed(width, self.block_size) * self.block_size)

    def draft_fixed(self, budget: DraftBudget, shown: int) -> Draft:
        """A grown tree, where trees grow, else the static one."""
        if not self.drafter.is_tree_dynamic or not budget.allows_grown_trees:
            return super().draft_fixed(budget, shown)
        assert self.fixed is not None  # the caller asked
        options, depth = self.drafter.generation_config, self._deepest(budget)
        num_nodes = min(options.num_tree_nodes, budget.num_nodes)
        whole_blocks = -(-depth // self.block_size) * self.block_size
        fixed_noise, draws = drawn_ahead(budget, len(self.num_read), whole_blocks)
        shape = (options.tree_top_k, num_nodes, depth, budget.is_chain, self._stored_temperatures)
        draft = self.fixed.draft(("grown", *shape, draws), num_nodes)
        self.constants = draft.constants

        def work() -> None:
            growth = TreeGrowth(self.roots, self.max_depths()[:, 0])
            grown = self._grow(growth, depth, fixed_noise, self.first_features(self.tree))
            draft.constants |= growth.layouts
            num = grown.token_ids.shape[1]  # fewer than there is room for, where not so many are considered
            draft.token_ids[:, :num].copy_(grown.token_ids)
            draft.parents[:, :num].copy_(grown.parents)

        return self.filled(draft, depth, budget, shown, work)

    @property
    def _stored_temperatures(self) -> Any:
        stored = self.drafter.config.confidence_temperatures
        return None if stored is None else tuple(map(tuple, stored.values()))

    def _grow(self, growth: TreeGrowth, depth: int, budget: DraftBudget, features: Tensor) -> Draft:
        """The draft after the passes that `depth` takes, or as many of them as pay."""
        options, size, prices = self.drafter.generation_config, self.block_size, budget.prices
        wanted = max(options.tree_top_k, prices.width if prices else 0)
        width = 1 if budget.is_chain else min(wanted, self.num_draftable_tokens)
        num_blocks = num_fed(width, size)
        num_passes = -(-depth // size)
        ends = blocks = torch.zeros_like(self.roots)  # nodes that blocks of a pass follow, and whose lists these are
        seen = torch.zeros(*ends.shape, 0, dtype=torch.bool, device=ends.device)  # blocks that each block sees
        num_kept, net_gain = min(options.num_tree_nodes, budget.num_nodes), 0.0
        marginal_gains: list[tuple[float, float]] = []

        def pays() -> bool:  # what is below nodes that do not
            assert prices is not None  # else nobody asks
            return growth.newest_are_kept(growth.best_tree_size(prices.nodes, prices.weights)[0])

        for number in range(num_passes):
            if number:
                expected_tokens = float(growth.log_node_probs.gather(1, ends).exp().sum()) if prices else 0.0
                if prices and not prices.pays(number, expected_tokens):
                    num_passes = number
                    break
                features, seen = self._feed(growth, ends, features, blocks, seen, number)
            children = self.children_of(growth, features, budget, number * size, width)
            grown = growth.expand_blocks(ends, size, children, num_blocks, pays if prices else None)
            if prices:
                before = net_gain
                num_kept, net_gain = growth.best_tree_size(prices.nodes, prices.weights)
                marginal_gains += [(expected_tokens, net_gain - before)] if number else []
            if grown is None:
                num_passes = number + 1
                break
            ends, blocks = grown
        self.forget_drafted()
        token_ids, tree = growth.best(num_kept)
        return Draft(
            token_ids,
            tree.parents,
            num_passes=num_passes,
            node_probs=growth.best_node_probs(num_kept) if budget.wants_node_probs else None,
            expected_by_depth=growth.expected_by_depth(num_kept, self._deepest(budget)) if prices else None,
            marginal_gains=tuple(marginal_gains),
        )

    def _feed(
        self, growth: TreeGrowth, ends: Tensor, features: Tensor, blocks: Tensor, seen: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        """Run pass `number` on the tokens that end at the nodes `ends`: its features, and what its blocks see."""
        size = self.block_size
        own = torch.eye(ends.shape[1], dtype=torch.bool, device=ends.device).expand(len(ends), -1, -1)
        above = seen.gather(1, blocks[..., None].expand(-1, -1, seen.shape[-1]))
        seen = torch.cat([above, own], dim=-1)
        slots = seen.repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)
        fed = growth.token_ids.gather(1, growth.path_up(ends, size).flatten(1)).unflatten(1, (-1, size))
        return self.draft_blocks(fed, features, blocks, slots, number), seen

    def _deepest(self, budget: DraftBudget) -> int:
        """How deep trees may grow: as the options say, or, where none does, as far as passes pay or are asked for."""
        options, depth = self.drafter.generation_config, self.drafter.tree_depth
        if (budget.prices or budget.num_passes) and options.tree_depth is None and self.feature_layers in {(), (-1,)}:
            depth *= PASSES_THAT_MAY_PAY
        return depth if budget.num_passes is None else min(depth, budget.num_passes * self.block_size)

    def children_of(
        self, growth: TreeGrowth, features: Tensor, budget: DraftBudget, depth: int, width: int
    ) -> Children:
        """The candidates at each offset of blocks that start below `depth`, for [`TreeGrowth.expand_blocks`]."""
        logits = self.draft_logits(features)
        if self.predicts_independently:  # what stands before an offset changes nothing there
            best = self.log_node_probs(logits, budget, depth).topk(width, dim=-1)
            token_ids = self.target_ids(best.indices)
        else:
            scores, prepared = self.scores(logits, budget, depth), self.prepare(features)
            temperatures = self._temperatures(depth, budget, scores)

        def children(offset: int, nodes: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
            if self.predicts_independently:
                lists = blocks[..., None].expand(-1, -1, width)
                return token_ids[:, :, offset].gather(1, lists), best.values[:, :, offset].gather(1, lists)
            path = growth.path_up(nodes, offset + 1)
            seen = growth.token_ids.gather(1, path.flatten(1)).reshape(path.shape)
            after = self.logits_after(seen, scores[:, :, offset], prepared[:, :, offset], blocks)
            found = (after / temperatures[offset]).log_softmax(dim=-1).topk(width, dim=-1)
            return self.target_ids(found.indices), found.values

        return children

    def log_node_probs(self, logits: Tensor, budget: DraftBudget, depth: int) -> Tensor:
        """Log probability that the target takes each token, of logits `[rows, lists, offsets, tokens]` below `depth`.

        It takes the best of its own scores. If those are the drafter's plus independent Gumbel noise of some spread,
        the probability of a token is the softmax of the drafter's scores at that spread as temperature: as
        `confidence_temperatures` of the config have it, else 1 or the temperature of the draws.
        """
        offset, scores = depth % self.block_size, self.scores(logits, budget, depth)
        temperatures = self._temperatures(depth - offset, budget, scores)[offset : offset + logits.shape[2]]
        return (scores / temperatures[:, None]).log_softmax(dim=-1)

    def _temperatures(self, depth: int, budget: DraftBudget, scores: Tensor) -> Tensor:
        """The temperatures of a block that starts below `depth`, in the type and on the device of `scores`."""
        stored = self.drafter.config.confidence_temperatures
        values = tuple(block_temperatures(stored, depth, self.block_size, budget.temperature))
        key = (values, scores.dtype, scores.device)
        if key not in self.constants:
            self.constants[key] = scores.new_tensor(values)
        found: Tensor = self.constants[key]
        return found

    def scores(self, logits: Tensor, budget: DraftBudget, depth: int) -> Tensor:
        """Scores of which the target would take the best if its logits were these, less scaled log noise."""
        if budget.noise is None:
            return logits
        rows, _blocks, size, _tokens = logits.shape
        noises = [budget.noise(row, depth + offset + 1) for row in range(rows) for offset in range(size)]
        noise = torch.stack(noises).to(logits)
        noise = noise if self.draft_token_ids is None else noise[:, self.draft_token_ids.to(noise.device)]
        return logits - (budget.temperature or 1.0) * noise.log().reshape(rows, 1, size, -1)


def num_fed(width: int, block_size: int) -> int:
    """Blocks that are fed in each pass after the first, so that it feeds about `width` tokens."""
    return max(width // block_size, LEAST_BLOCKS)
