"""Drafting with DiffuSpec: the diffusion model fills in masks behind the text, and a search picks a path or a tree.

A searched path is no draw, so it comes without draft probabilities: the walk compares tokens. Only drawn
marginals are handed over with their distributions (arXiv 2510.02358, equation 6, which holds for these alone).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ...generation.drafting import Committed, Draft, DraftBudget, TargetView, TreeCandidateGenerator
from .denoising import DenoisedRow
from .draft_length import length_rule
from .lattice import Lattice, prune
from .path_search import LatticeTree, PathScores, argmax_path, draw_marginals, search_path, tree_over

if TYPE_CHECKING:
    from .configuration_diffuspec import DiffusionConfig
    from .modeling_diffuspec import DiffusionDrafter
    from .proxy import ContextProxy


class DiffusionCandidateGenerator(TreeCandidateGenerator):
    """Drafting with a [`DiffusionDrafter`] during one call; rows are denoised one after the other."""

    feature_layers = ()

    def __init__(self, drafter: "DiffusionDrafter", target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(target, max_length, rng)
        self.drafter, self.config = drafter, drafter.config
        self.end_ids, self.forbidden_ids = _special_ids(self.config)
        self._rows: list[_Row] = []
        self._search_seconds = 0.0  # of the newest draft

    def commit(self, committed: Committed) -> None:
        """Keep the new text, and learn how much of each row's draft was kept."""
        self._rows = self._rows or [_Row(self.drafter) for _ in committed.lengths]
        for number, (row, length) in enumerate(zip(self._rows, committed.lengths, strict=True)):
            row.text = committed.sequence_ids[number, :length]
            if row.num_generated is not None and committed.num_new[number]:
                row.length_rule.observe(row.num_generated, committed.num_new[number] - 1)
            row.num_generated = None

    @torch.no_grad()
    def propose(self, budget: DraftBudget) -> Draft | None:
        """A path or a tree for each row within the budget; None where no row may have one."""
        num_steps = self.config.num_steps
        if budget.num_passes is not None:
            num_steps = min(num_steps, budget.num_passes)
        num_below = None if self._draws_tree(budget) else budget.num_nodes - 1
        depths = budget.depths if num_steps else (0,) * len(self._rows)
        nums = [row.num_positions(depth, num_below) for row, depth in zip(self._rows, depths, strict=True)]
        if not any(nums):
            return None
        self._search_seconds = 0.0
        scores = [self._filled_in(number, num, num_steps, budget) for number, num in enumerate(nums)]
        if self.config.search == "marginal" and budget.temperature is not None and budget.noise is None:
            return self._drawn(scores, budget, num_steps)
        trees = [self._searched(row, part, budget) for row, part in zip(self._rows, scores, strict=True)]
        return self._draft(trees, scores, budget, num_steps)

    def _draws_tree(self, budget: DraftBudget) -> bool:
        """Whether the draft is a tree and no path."""
        return self.config.search == "tree" and not budget.is_chain

    def _filled_in(self, number: int, num: int, num_steps: int, budget: DraftBudget) -> Tensor:
        """Scores `[num, vocab]` over the target's tokens of the positions behind a text, less noise that is known."""
        if not num:
            return torch.empty(0, self.target.vocab_size, dtype=torch.float)
        row = self._rows[number]
        text = row.text.to(self.drafter.device)
        text = text.where(text < self.drafter.model.config.vocab_size, 0)  # one that the model lacks
        noise = None
        if budget.noise is not None:
            coming = [budget.noise(number, depth) for depth in range(1, num + 1)]
            noise = torch.stack(coming).to(self.drafter.device, torch.float).log() * (budget.temperature or 1.0)
        return row.reader.scores(text, num, num_steps, partial(self._scores, noise=noise))

    def _scores(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Logits `[positions, vocab]` over the target's tokens, -inf where it would never write one."""
        shared = logits[:, : self.config.draft_vocab_size]
        scores = functional.pad(shared, (0, self.target.vocab_size - shared.shape[1]), value=-torch.inf)
        scores.index_fill_(1, torch.tensor(self.forbidden_ids, dtype=torch.long, device=scores.device), -torch.inf)
        return scores if noise is None else scores - noise

    def _lattice(self, row: "_Row", scores: Tensor, budget: DraftBudget) -> Lattice:
        """The candidates of the positions to draft for; the row remembers where the text seems to end."""
        with self._searching():
            sharpened = scores / (budget.temperature or 1.0)
            lattice = prune(sharpened, self.config.mass, self.config.max_candidates, self.end_ids)
        lattice = lattice.cpu()  # waits for the pass
        row.num_generated = lattice.num_generated
        return lattice.first(row.length_rule.kept_length(lattice.confidences))

    def _searched(self, row: "_Row", scores: Tensor, budget: DraftBudget) -> LatticeTree:
        """The path or tree that the search picks for one row, root included."""
        config, root = self.config, int(row.text[-1])
        if not len(scores):
            return LatticeTree.path(root)
        lattice = self._lattice(row, scores, budget)
        with self._searching():
            if config.search in ("argmax", "marginal"):
                return LatticeTree.path(root, argmax_path(lattice))
            mixed = PathScores(lattice, row.read_proxy(), row.text[-2:].tolist(), config.model_weight)
            if self._draws_tree(budget):
                return tree_over(mixed, root, min(self.drafter.generation_config.num_tree_nodes, budget.num_nodes))
            return LatticeTree.path(root, search_path(mixed, config.beam_width))

    def _drawn(self, scores: list[Tensor], budget: DraftBudget, num_steps: int) -> Draft:
        """Drawn paths of all rows and what they were drawn from; how long they are does not depend on the draws."""
        nums = [
            self._lattice(row, part, budget).length if len(part) else 0
            for row, part in zip(self._rows, scores, strict=True)
        ]
        cut = pad_sequence([part[:num].to(self.drafter.device) for part, num in zip(scores, nums, strict=True)], True)
        tokens, probs = draw_marginals(cut, budget, self.rng)
        trees = [
            LatticeTree.path(int(row.text[-1]), drawn[:num].tolist())
            for row, drawn, num in zip(self._rows, tokens, nums, strict=True)
        ]
        draft = self._draft(trees, scores, budget, num_steps)
        index = torch.arange(draft.token_ids.shape[1], device=probs.device)
        return replace(draft, draft_probs=probs, dist_index=index.where(index < len(index) - 1, -1)[None])

    def _draft(self, trees: list[LatticeTree], scores: list[Tensor], budget: DraftBudget, num_steps: int) -> Draft:
        """The draft of all rows; shorter rows end in nodes that belong to nobody."""
        pairs = zip(trees, scores, strict=True)
        node_probs = [_node_probs(tree, part, budget) for tree, part in pairs] if budget.wants_node_probs else []
        return Draft(
            pad_sequence([torch.tensor(tree.token_ids) for tree in trees], True).to(self.drafter.device),
            pad_sequence([torch.tensor(tree.parents) for tree in trees], True, -1).to(self.drafter.device),
            num_passes=num_steps,
            node_probs=pad_sequence(node_probs, True) if node_probs else None,
            search_seconds=self._search_seconds,
        )

    @contextmanager
    def _searching(self) -> Iterator[None]:
        """Count the time inside as seconds of searching."""
        start = self.clock()
        try:
            yield
        finally:
            self._search_seconds += self.clock() - start


class _Row:
    """The state of one row during a call: its text, proxy and draft length."""

    def __init__(self, drafter: "DiffusionDrafter") -> None:
        self.reader, self.length_rule = DenoisedRow(drafter), length_rule(drafter.config)
        self.text = torch.empty(0, dtype=torch.long)  # all committed tokens
        self.num_generated: int | None = None  # of a draft that is not verified yet, the positions before its end
        self._proxy = None if drafter.proxy is None else drafter.proxy.in_context()
        self._num_counted = 0

    def num_positions(self, depth: int, num_below: int | None) -> int:
        """Positions to fill in; a path has no more than `num_below` nodes below the root."""
        most = min(depth, self.length_rule.length, self.reader.max_draft_tokens(len(self.text)))
        return most if num_below is None else min(most, num_below)

    def read_proxy(self) -> "ContextProxy | None":
        """The proxy, which has read all of the text; None without one."""
        if self._proxy is not None:
            self._proxy.update(self.text[self._num_counted :].tolist())
            self._num_counted = len(self.text)
        return self._proxy


def _node_probs(tree: LatticeTree, scores: Tensor, budget: DraftBudget) -> Tensor:
    """The diffusion model's probability of each node `[nodes]` of one row, 1 at the root."""
    depths = [0]
    for parent in tree.parents[1:]:
        depths.append(depths[parent] + 1)
    probs = torch.softmax(scores / (budget.temperature or 1.0), dim=-1).cpu()
    below = probs[torch.tensor(depths)[1:] - 1, torch.tensor(tree.token_ids)[1:]]
    return torch.cat([torch.ones(1, dtype=torch.float), below])


def _special_ids(config: "DiffusionConfig") -> tuple[list[int], list[int]]:
    """Tokens that end a text, and tokens that never follow one: the mask, and what begins or fills up texts."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    end_ids = [end for end in ends if end is not None and end < config.vocab_size]
    never = (config.mask_token_id, config.bos_token_id, config.pad_token_id)
    known = {token for token in never if token is not None and token < config.vocab_size}
    return end_ids, sorted(known - set(end_ids))
