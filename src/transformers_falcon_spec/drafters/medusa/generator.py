"""Drafting with Medusa: all heads read the newest feature, and nodes of one depth take the tokens of one head."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.tree import DraftTree
from ...errors import OptionError
from ...generation.drafting import Committed, Draft, DraftBudget, TargetView, TreeCandidateGenerator
from ..tree_drafting.static import draw_children, fitted, parents_by_row, probs_of_nodes

if TYPE_CHECKING:
    from .modeling_medusa import MedusaDrafter


class MedusaCandidateGenerator(TreeCandidateGenerator):
    """One call's drafting with a [`MedusaDrafter`]. All that it remembers is the newest feature of each row."""

    def __init__(self, drafter: "MedusaDrafter", target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(target, max_length, rng)
        self.drafter = drafter
        self.feature_layers = drafter.feature_layers
        self._tree = drafter.draft_tree
        self._max_depth = int(self._tree.depths.max())
        num_ranks = int(self._tree.ranks.max()) + 1
        if num_ranks > target.vocab_size:
            raise OptionError(
                f"`draft_tree` asks for the {num_ranks} best tokens of a position, but the drafter knows "
                f"{target.vocab_size}. Take a narrower tree."
            )
        self._roots: list[Tensor] = []  # of each row [1] its newest token
        self._features: list[Tensor | None] = []  # of each row [hidden], that from which its newest token follows

    def commit(self, committed: Committed) -> None:
        """Keep the newest pair of each row."""
        assert committed.features is not None  # one layer is read
        if not self._features:
            self._features = [None] * len(committed.lengths)
        rows = zip(committed.sequence_ids, committed.lengths, strict=True)
        self._roots = [ids[length - 1 : length] for ids, length in rows]
        for row, num_new in enumerate(committed.num_new):
            if num_new:
                self._features[row] = committed.features[row, num_new - 1].clone()

    def propose(self, budget: DraftBudget) -> Draft | None:
        """Draft the tree, cut to the budget; None while no row has a feature."""
        found = [feature for feature in self._features if feature is not None]
        if not found:
            return None
        depths = [
            depth if feature is not None else 0 for depth, feature in zip(budget.depths, self._features, strict=True)
        ]
        num_passes = 1 if budget.num_passes is None else min(budget.num_passes, 1)
        max_depth = min(max(depths), self._max_depth * num_passes)
        tree = fitted(self._tree, max_depth, budget.num_nodes, budget.is_chain)
        plan = _plan(tree, self.drafter.device)
        token_ids = torch.stack(self._roots).to(self.drafter.device).repeat(1, len(tree))
        parents = parents_by_row(tree, depths).to(token_ids.device)
        if not plan.num_heads:
            return Draft(token_ids, parents, num_passes=0)
        features = [torch.zeros_like(found[0]) if feature is None else feature for feature in self._features]
        logits = self._logits(torch.stack(features).to(self.drafter.device), plan.num_heads)
        if budget.temperature is None:
            best = logits.topk(plan.num_ranks, dim=-1).indices  # [rows, heads, ranks]
            token_ids[:, 1:] = best[:, plan.heads, plan.ranks].to(token_ids.device)
            return Draft(token_ids, parents, node_probs=_node_probs(plan, logits, token_ids, budget))
        probs = torch.softmax(logits / budget.temperature, dim=-1)
        heads = plan.heads_of_parents
        children = draw_children(probs[:, heads], (heads + 1).tolist(), plan.num_children, budget, self.rng)
        token_ids[:, 1:] = children[:, plan.siblings[0], plan.siblings[1]].to(token_ids.device)
        node_probs = _node_probs(plan, logits, token_ids, budget)
        return Draft(token_ids, parents, draft_probs=probs, dist_index=plan.dist_index, node_probs=node_probs)

    def _logits(self, features: Tensor, num_heads: int) -> Tensor:
        """Logits `[rows, heads, vocab]` of the first heads for features `[rows, hidden]`."""
        outputs = self.drafter(features[:, None].expand(-1, num_heads, -1))
        return outputs.float() if self.drafter.config.has_lm_heads else self.target.head(outputs)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Where every node takes its token.

    Args:
        num_heads (`int`): Heads needed: the depth of the tree.
        num_ranks (`int`): Best tokens needed of a head.
        num_children (`int`): Most children of a node.
        heads (`torch.Tensor` of shape `(nodes - 1,)`): The head of each node below the root.
        ranks (`torch.Tensor` of shape `(nodes - 1,)`): Which of that head's best tokens it takes.
        heads_of_parents (`torch.Tensor` of shape `(parents,)`): For each node with children the head that drafts them.
        siblings (`torch.Tensor` of shape `(2, nodes - 1)`): The index of each node's parent among those, and its own
            among its siblings.
        dist_index (`torch.Tensor` of shape `(1, nodes)`): The head that drafts a node's children; -1 where it has
            none.
    """

    num_heads: int
    num_ranks: int
    num_children: int
    heads: Tensor
    ranks: Tensor
    heads_of_parents: Tensor
    siblings: Tensor
    dist_index: Tensor


def _node_probs(plan: _Plan, logits: Tensor, token_ids: Tensor, budget: DraftBudget) -> Tensor | None:
    """The heads' probability of each node; None where nobody asks."""
    if not budget.wants_node_probs:
        return None
    probs = torch.softmax(logits[:, plan.heads_of_parents] / (budget.temperature or 1.0), dim=-1)
    depths = (plan.heads_of_parents + 1).tolist()
    below = probs_of_nodes(probs, token_ids[:, 1:], plan.siblings[0], depths, budget)
    return torch.cat([torch.ones(len(below), 1, dtype=torch.float), below], dim=-1)


@lru_cache(maxsize=256)
def _plan(tree: DraftTree, device: torch.device) -> _Plan:
    """The plan of a one-row tree; trees are distinguished by identity."""
    parent_of, depths, ranks = (values[0].tolist() for values in (tree.parents, tree.depths, tree.ranks))
    parents = sorted(set(parent_of[1:]))
    indices = [parent_of[1:node].count(parent_of[node]) for node in range(1, len(tree))]
    siblings = [[parents.index(parent) for parent in parent_of[1:]], indices]
    return _Plan(
        num_heads=max(depths),
        num_ranks=max(ranks) + 1,
        num_children=max(indices, default=-1) + 1,
        heads=torch.tensor(depths[1:], device=device, dtype=torch.long) - 1,
        ranks=torch.tensor(ranks[1:], device=device, dtype=torch.long),
        heads_of_parents=torch.tensor([depths[parent] for parent in parents], device=device, dtype=torch.long),
        siblings=torch.tensor(siblings, device=device, dtype=torch.long),
        dist_index=torch.tensor(
            [[depths[node] if node in parents else -1 for node in range(len(tree))]], device=device
        ),
    )
