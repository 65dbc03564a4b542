"""Drafting trees that grow: in every pass the likeliest blocks are fed, and of all nodes the likeliest are kept.

Token matching follows the target's own tokens, so any tree will do for it. Where drawn tokens are compared with their
probabilities the tree is static, for choosing nodes by what was drawn would bias the text. Source: arXiv 2406.16858,
section 4, there with blocks of one token.

A tree may have a branch of repeated text: what followed the newest tokens where they stood before. Where that is all
but sure, as in a loop, it is the whole draft, and what the drafter did not read waits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ...core.branches import with_chain
from ...core.tree import DraftTree
from ...core.tree_growth import Children, TreeGrowth
from ...errors import OptionError
from ...generation.drafting import Committed, Draft, DraftBudget, Kept, TargetView
from ..base import DrafterModel
from .configuration import block_temperatures
from .repeated_text import NGRAM_SIZE, Branch, RepeatedText
from .static import StaticTreeGenerator, drawn_ahead, gives_probs, tree_from_json

LEAST_BLOCKS = 2  # fed in a later pass where there are so many; `LOG.md` says what the second one brings
MOST_UNREAD = 128  # pairs that wait for the drafter while the text goes on alone
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


class GrownTreeGenerator(StaticTreeGenerator):
    """A generator that grows a tree for each row, or drafts a static one, `block_size` tokens a pass.

    Trees get a branch of repeated text, where the options ask for one.
    """

    text: RepeatedText | None = None

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

    def commit(self, committed: Committed) -> None:
        """Keep the new text and its pairs for the next proposal."""
        super().commit(committed)
        if self.text is not None:
            self.text.commit(committed)

    def commit_kept(self, kept: Kept) -> None:
        """The same in fixed shapes."""
        super().commit_kept(kept)
        if self.text is not None:
            self.text.commit_kept(kept)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        super().select_rows(rows)
        if self.text is not None:
            self.text.select_rows(rows)

    def propose(self, budget: DraftBudget) -> Draft | None:
        """The drafter's tree with the branch of repeated text, or the branch alone."""
        branch = self._branch(budget)
        if branch is None:
            return self.propose_tree(budget)
        if branch.is_sure and budget.num_passes is None and max(self.num_unread, default=0) < MOST_UNREAD:
            return self._joined(self._roots_alone(), branch, budget)
        draft = self.propose_tree(budget)
        return draft if draft is None or budget.is_chain else self._joined(draft, branch, budget)

    def _branch(self, budget: DraftBudget) -> Branch | None:
        """The branch of this step, if there is one.

        Rules that compare drafted tokens with what these were drawn from get none: nothing was drawn here.
        """
        if self.text is None or gives_probs(budget) or not budget.allows_grown_trees:
            return None
        return self.text.branch(budget.depths, budget.num_nodes - 1)

    def _roots_alone(self) -> Draft:
        roots = self.roots
        parents = None if self.fixed is None else self.fixed.draft("roots", 1).parents  # which nobody writes to
        parents = torch.full_like(roots, -1) if parents is None else parents
        return Draft(roots, parents, num_passes=0, max_depth=0, is_text_alone=True)

    def _joined(self, draft: Draft, branch: Branch, budget: DraftBudget) -> Draft:
        """A draft with the tokens of the branch that it does not hold, as many as the budget allows and as pay."""
        num_before = draft.token_ids.shape[1]
        room = budget.num_nodes - num_before
        branch = branch.first(room)
        if budget.prices is not None:
            branch = branch.paying(budget.prices, num_before)
        if not len(branch):
            return draft
        return self._joined_anew(draft, branch) if self.fixed is None else self._joined_in_place(draft, branch, room)

    def _joined_anew(self, draft: Draft, branch: Branch) -> Draft:
        """In as many nodes as it takes."""
        device, num_before = draft.token_ids.device, draft.token_ids.shape[1]
        parents = draft.parents.to(device).expand_as(draft.token_ids)
        depth = min(num_before - 1, len(branch))
        token_ids, parents, num_held = with_chain(draft.token_ids, parents, branch.token_ids.to(device), depth)
        num_new = int((parents[:, num_before:] >= 0).sum(1).max())
        if not num_new:
            return draft
        num_held, num_nodes, added = num_held.cpu(), num_before + num_new, dict[str, Any]()
        if draft.max_depth is not None:
            added["max_depth"] = max(draft.max_depth, len(branch))
        if draft.node_probs is not None:
            columns = (num_held + torch.arange(num_new)).clamp(max=len(branch) - 1)
            new_probs = branch.next_probs.gather(1, columns).to(draft.node_probs)
            added["node_probs"] = torch.cat([draft.node_probs, new_probs], dim=1)
        if draft.expected_by_depth is not None:
            expected = branch.expected_by_depth(num_held).to(draft.expected_by_depth)
            added["expected_by_depth"] = pad_sequence([draft.expected_by_depth, expected]).sum(1)
        return replace(draft, token_ids=token_ids[:, :num_nodes], parents=parents[:, :num_nodes], **added)

    def _joined_in_place(self, draft: Draft, branch: Branch, room: int) -> Draft:
        """In tensors of fixed shape, which has a node for each token that a branch may have."""
        assert self.text is not None  # it gave the branch
        num_before, num_tokens = draft.token_ids.shape[1], min(self.text.num_tokens, room)
        sources = (draft.token_ids.data_ptr(), draft.parents.data_ptr(), num_before)
        joined = self.buffers.draft(("with text", *sources, num_tokens), num_before + num_tokens)
        known, depth = joined.constants, min(num_before - 1, num_tokens)
        if not known:
            with torch.inference_mode(False):
                chain = torch.zeros(len(joined.token_ids), num_tokens, dtype=torch.long, device=joined.parents.device)
            known |= {"token_ids": draft.token_ids, "parents": draft.parents, "chain": chain}
        padded = functional.pad(branch.token_ids, (0, num_tokens - len(branch)), value=-1)
        known["chain"].copy_(padded, non_blocking=True)

        def work() -> None:
            token_ids, parents, _ = with_chain(known["token_ids"], known["parents"], known["chain"], depth)
            joined.token_ids.copy_(token_ids)
            joined.parents.copy_(parents)

        self.buffers.fill(joined, 0, work)
        max_depth = max(draft.depth, len(branch))
        return replace(draft, token_ids=joined.token_ids, parents=joined.parents, max_depth=max_depth)

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
        options, depth = self.drafter.generation_config, self._deepest(budget)
        num_nodes = min(options.num_tree_nodes, budget.num_nodes)
        whole_blocks = -(-depth // self.block_size) * self.block_size
        fixed_noise, draws = drawn_ahead(budget, len(self.num_read), whole_blocks)
        shape = (options.tree_top_k, num_nodes, depth, budget.is_chain, self._stored_temperatures)
        draft = self.buffers.draft(("grown", *shape, draws), num_nodes)
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
