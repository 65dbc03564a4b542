"""Drafting with Medusa: all heads read the newest feature, and nodes of one depth take the tokens of one head."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...core.tree import DraftTree
from ...errors import OptionError
from ...generation.drafting import Committed, Draft, DraftBudget, TargetView
from ..tree_drafting.fixed import newest_of
from ..tree_drafting.pending import PendingPairs
from ..tree_drafting.static import StaticTreeGenerator, fitted

if TYPE_CHECKING:
    from .modeling_medusa import MedusaDrafter


class MedusaCandidateGenerator(StaticTreeGenerator):
    """One call's drafting with a [`MedusaDrafter`], in one pass; all that it remembers is each row's newest pair."""

    can_be_fixed = True

    def __init__(self, drafter: "MedusaDrafter", target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self.tree, self.block_size = drafter.draft_tree, drafter.block_size
        num_ranks = int(self.tree.ranks.max()) + 1
        if num_ranks > target.vocab_size:
            raise OptionError(
                f"`draft_tree` asks for the {num_ranks} best tokens of a position, but the drafter knows "
                f"{target.vocab_size}. Take a narrower tree."
            )

    def commit(self, committed: Committed) -> None:
        """Keep the newest pair of each row."""
        if self.fixed is not None:
            super().commit(committed)
            return
        assert committed.features is not None  # one layer is read
        self.pending = self.pending or [PendingPairs() for _ in committed.lengths]
        for row, (length, num_new) in enumerate(zip(committed.lengths, committed.num_new, strict=True)):
            root = committed.sequence_ids[row, length - 1 : length]
            feature = committed.features[row, max(num_new - 1, 0) : num_new].clone()
            self.pending[row].add(root[: len(feature)], feature, root)
            self.pending[row].keep_newest(1)

    def propose(self, budget: DraftBudget) -> Draft | None:
        """Draft the tree, cut to the budget; None while no row has a feature."""
        if self.fixed is not None:
            return self.propose_fixed(budget)
        if not any(self.num_unread):
            return None
        depths = [depth if num else 0 for depth, num in zip(budget.depths, self.num_unread, strict=True)]
        tree = fitted(self.tree, min(max(depths), self.block_size), budget.num_nodes, budget.is_chain)
        features = pad_sequence([pending.features[0] for pending in self.pending], batch_first=True)
        return self.draft_static(tree, depths, budget, _for_heads(features[:, None], tree))

    def read_unread(self) -> Tensor:
        """The newest feature of each row, `[rows, 1, 1, feature]`."""
        self.num_read = [min(num, 1) for num in self.num_unread]
        return pad_sequence([pending.features[0] for pending in self.pending], batch_first=True)[:, None]

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:  # noqa: ARG002  heads see features
        """The newest feature of each row, of those in fixed shapes."""
        return newest_of(features, num - 1)[:, None]

    def first_features(self, tree: DraftTree) -> Tensor:
        """The newest feature of each row for every head, `[rows, 1, heads, feature]`."""
        return _for_heads(super().first_features(tree), tree)

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits `[rows, 1, heads, vocab]` of the first heads."""
        outputs = self.run("forward", self.to_drafter(features))
        return outputs.float() if self.drafter.config.has_lm_heads else self.target.head(outputs)


def _for_heads(features: Tensor, tree: DraftTree) -> Tensor:
    """Features `[rows, 1, 1, feature]` for the heads that `tree` needs; others are not computed."""
    return features.expand(-1, -1, int(tree.depths.max()), -1)
