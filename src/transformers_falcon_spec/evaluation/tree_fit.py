"""Measures acceptance by depth and sibling rank in the decoding loop itself, and fits the best static tree to it."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.tree import MAX_NODES, DraftTree
from ..core.verification import AcceptedPath
from ..drafters.base import DrafterModel
from ..errors import OptionError, TargetError
from ..generation.drafting import Draft
from ..generation.options import SpeculationConfig
from ..generation.output import observe_steps
from ..generation.probe import probe
from ..generation.timed import Options, timed_generate
from .prompts import Prompt

Counts = list[list[int]]  # [depths][ranks + 1]; the last column: the target's token was none of the children


class RankLog:
    """Notes the sibling ranks of the target's tokens below accepted nodes; an observer of calls with one row.

    Only nodes with `num_ranks` children count.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.steps: list[list[int | None]] = []  # of each step by depth; `num_ranks` for a miss, None if not measured

    def __call__(self, draft: Draft, accepted: Sequence[AcceptedPath]) -> None:
        """Note the ranks of one step."""
        parents, token_ids = draft.parents[0].tolist(), draft.token_ids[0].tolist()
        ranks: list[int | None] = []
        for node, token in zip(accepted[0].path, accepted[0].token_ids, strict=True):
            children = [token_ids[child] for child, parent in enumerate(parents) if parent == node]
            rank = children.index(token) if token in children else self.num_ranks
            ranks.append(rank if len(children) == self.num_ranks else None)

        self.steps.append(ranks)

    def counts(self, depth: int) -> Counts:
        """How often each rank was taken at each depth, without the text's last token: a hit there gains nothing."""
        counts = [[0] * (self.num_ranks + 1) for _ in range(depth)]
        for number, ranks in enumerate(self.steps, start=1):
            for level, rank in enumerate(ranks[:-1] if number == len(self.steps) else ranks):
                if rank is not None:
                    counts[level][rank] += 1

        return counts


class TreeFit:
    """Measures a drafter of static trees, which stays as it is, with a tree that is wide enough to see every rank.

    The tree has `num_passes` passes, or as many as the drafter's own, and at each depth `num_ranks` children below the
    `width` nodes of the best ranks.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: DrafterModel,
        num_passes: int | None = None,
        num_ranks: int = 10,
        width: int = 6,
    ) -> None:
        if drafter.draft_tree is None:
            raise OptionError(
                f"The drafter must draft static trees, but a `{type(drafter).__name__}` has none. There is "
                "nothing to fit."
            )

        if probe(target).form in {"chain", "plain"}:
            raise TargetError(f"A tree needs a target that verifies trees, but {probe(target).reason}. Draft a chain.")

        self.target, self.tokenizer, self.present = target, tokenizer, drafter.draft_tree
        passes = -(-int(self.present.depths.max()) // drafter.block_size) if num_passes is None else num_passes
        self.settings = {"passes": passes, "ranks": num_ranks, "width": width}
        self.depth, self.num_ranks = passes * drafter.block_size, num_ranks
        self.drafter = copy.copy(drafter)  # the same weights
        tree = measuring_tree(self.depth, num_ranks, width).to_json()
        self.drafter.generation_config = SpeculationConfig(tune=False, dynamic_tree=False, draft_tree=tree)
        self.drafter.check_target(target)

    def watch(self, prompt: Prompt, options: Options, max_new_tokens: int, seed: int) -> RankLog:
        """Write one text with the measuring tree and return what was counted."""
        log, ids = RankLog(self.num_ranks), prompt.input_ids(self.tokenizer)
        with observe_steps(log):
            timed_generate(self.target, ids, max_new_tokens, options, seed, self.drafter)

        return log


def measuring_tree(depth: int, num_ranks: int, width: int) -> DraftTree:
    """A tree in which the `width` nodes of each depth with the least sum of ranks have `num_ranks` children."""
    parents, ranks, sums = [-1], [-1], [0]
    level = [0]
    for _ in range(depth):
        expanded = sorted(level, key=lambda node: sums[node])[:width]
        level = list(range(len(parents), len(parents) + len(expanded) * num_ranks))
        if level[-1] >= MAX_NODES:
            raise OptionError(
                f"The tree that measures must have at most {MAX_NODES} nodes, but {depth} depths of "
                f"{num_ranks} ranks below {width} nodes each make more. Lower `passes`."
            )

        for parent in expanded:
            parents += [parent] * num_ranks
            ranks += range(num_ranks)
            sums += range(sums[parent], sums[parent] + num_ranks)

    return DraftTree.from_lists(parents, ranks)


def acceptance(counts: Sequence[Counts]) -> Tensor:
    """Acceptance probabilities `[depths, ranks]` from the counts of all texts, falling with rank.

    Half a hit is added to each rank and to the misses (the estimate of Krichevsky and Trofimov), so that a few
    observations do not pass for certainty. Noise may swap neighbouring ranks; the true order is known, so the
    probabilities of a depth are sorted.
    """
    total = torch.tensor(counts, dtype=torch.double).sum(0) + 0.5
    return (total / total.sum(-1, keepdim=True))[:, :-1].sort(dim=-1, descending=True).values


def fit_result(fit: TreeFit, counts: Sequence[Counts], num_nodes: int) -> dict[str, Any]:
    """The best tree of `num_nodes` nodes, root included, and the numbers behind it, as the results file holds them."""
    rates = acceptance(counts)
    tree = DraftTree.best_first(rates, num_nodes)
    present = fit.present
    is_covered = int(present.depths.max()) <= fit.depth and int(present.ranks.max()) < fit.num_ranks

    return {
        "draft_tree": tree.to_json(),
        "expected_acceptance_length": tree.expected_length(rates),
        "present_num_nodes": len(present),
        "present_expected_acceptance_length": present.expected_length(rates) if is_covered else None,
        "acceptance": rates.tolist(),
        "num_asked": torch.tensor(counts).sum(0).sum(-1).tolist(),
    }
