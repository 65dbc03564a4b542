"""Drafting with DiffuSpec: the diffusion model fills in masks behind the text, and a search picks a path or a tree.

A searched path is no draw, so it comes without draft probabilities: the walk compares tokens (arXiv 2510.02358 hands
over the marginals in equation 6, which holds for tokens drawn from them alone).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ...generation.drafting import Committed, Draft, DraftBudget, Kept, TargetView, TreeCandidateGenerator
from ...generation.static.eligibility import obstacle_in
from ..tree_drafting.pairs import why_probs_matter
from ..tree_drafting.static import drawn_ahead
from .denoising import DenoisedRow
from .draft_length import DraftLength
from .fixed import DenoisingPasses, FixedDenoising
from .lattice import Lattice, prune
from .path_search import LatticeTree, PathScores, search_path, tree_over

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
            text = committed.sequence_ids[number, :length]
            row.take(text if self.fixed is None else text.cpu(), committed.num_new[number])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self._rows = [self._rows[row] for row in rows]

    def commit_kept(self, kept: Kept) -> None:
        """The same of tokens that the host knows, too."""
        for row, new in zip(self._rows, kept.new_ids, strict=True):
            row.take(torch.cat([row.text, torch.tensor(new, dtype=torch.long)]), len(new))

    @property
    def has_unread(self) -> bool:
        """Whether there is text to begin with in fixed shapes: in each row the root, and something before it."""
        return bool(self._rows) and min(len(row.text) for row in self._rows) > 1

    def why_not_fixed(self, budget: DraftBudget) -> str | None:
        """Why drafts within such budgets cannot be made in fixed shapes, in words; None if they can."""
        if (attention := self.config.attention) != "prefix_causal":
            what = "text" if attention == "full" else "block that has begun"
            return f'with `attention="{attention}"` the diffusion model reads the {what} anew in every pass'
        return why_probs_matter(budget) or obstacle_in(self.drafter.model, "diffusion model")

    @torch.no_grad()
    def enter_fixed(self, num_slots: int, most_kept: int, buffers: Any = None) -> FixedDenoising:
        """Read all text but the roots, move it to buffers, and go on in them; the search stays on the host."""
        for row in self._rows:
            row.text = row.text.cpu()
            row.reader.read_text(self._known(row.text[:-1]))
        readers = [row.reader for row in self._rows]
        is_fit = isinstance(buffers, FixedDenoising) and buffers.fits(readers, most_kept)
        fixed: FixedDenoising = buffers if is_fit else FixedDenoising(readers, most_kept, num_slots)
        fixed.load(readers)
        for row in self._rows:
            row.reader = DenoisedRow(self.drafter)  # so that the text has one copy of its states
        self.fixed = fixed
        return fixed

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
        scores: list[Tensor] = []
        if self.fixed is None:
            scores = [self._filled_in(number, num, num_steps, budget) for number, num in enumerate(nums)]
            found = [self._pruned(part, budget).cpu() if len(part) else None for part in scores]  # waits for the pass
        else:
            found = self._read_fixed(nums, num_steps, budget)
        trees = [self._searched(row, lattice, budget) for row, lattice in zip(self._rows, found, strict=True)]
        return self._draft(trees, scores, budget, num_steps)

    def _draws_tree(self, budget: DraftBudget) -> bool:
        """Whether the draft is a tree and no path."""
        return self.config.search == "tree" and not budget.is_chain

    def _filled_in(self, number: int, num: int, num_steps: int, budget: DraftBudget) -> Tensor:
        """Scores `[num, vocab]` over the target's tokens of the positions behind a text, less noise that is known."""
        if not num:
            return torch.empty(0, self.target.vocab_size, dtype=torch.float)
        row, noise = self._rows[number], self._noise([number], num, budget)
        noise = None if noise is None else noise[0]
        return row.reader.scores(self._known(row.text), num, num_steps, lambda logits: self._scores(logits, noise))

    def _read_fixed(self, nums: Sequence[int], num_steps: int, budget: DraftBudget) -> list[Lattice | None]:
        """The candidates of each row's positions behind its text; the host waits once."""
        rows, most = range(len(self._rows)), self.config.most_draft_tokens
        coming, draws = drawn_ahead(budget, len(rows), most)
        passes = DenoisingPasses(
            num_steps,
            lambda logits: self._scores(logits, self._noise(rows, most, coming)),
            lambda scores: self._pruned(scores, coming),
            tuple(self.end_ids),
            (draws, budget.temperature),
        )
        found = self.fixed.lattices(self.drafter, [row.text for row in self._rows], nums, passes)
        return [lattice if num else None for lattice, num in zip(found, nums, strict=True)]

    def _known(self, text: Tensor) -> Tensor:
        """A text on the drafter's device, with another token for one that the model lacks."""
        text = text.to(self.drafter.device)
        return text.where(text < self.drafter.model.config.vocab_size, 0)

    def _noise(self, rows: Sequence[int], num: int, budget: DraftBudget) -> Tensor | None:
        """What draws to come take off the scores `[rows, num, vocab]`; None where they are not known."""
        if budget.noise is None:
            return None
        coming = torch.stack([budget.noise(row, depth) for row in rows for depth in range(1, num + 1)])
        scaled = coming.to(self.drafter.device, torch.float).log() * (budget.temperature or 1.0)
        return scaled.unflatten(0, (len(rows), num))

    def _scores(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Logits `[..., positions, vocab]` over the target's tokens, -inf where it would never write one."""
        shared = logits[..., : self.config.draft_vocab_size]
        scores = functional.pad(shared, (0, self.target.vocab_size - shared.shape[-1]), value=-torch.inf)
        for token in self.forbidden_ids:
            scores[..., token].fill_(-torch.inf)
        return scores if noise is None else scores - noise

    def _pruned(self, scores: Tensor, budget: DraftBudget) -> Lattice:
        """The candidates of all positions that were filled in."""
        with self._searching():
            sharpened = scores / (budget.temperature or 1.0)
            return prune(sharpened, self.config.mass, self.config.max_candidates, self.end_ids)

    def _searched(self, row: "_Row", lattice: Lattice | None, budget: DraftBudget) -> LatticeTree:
        """The path or tree that the search picks for one row, root included."""
        config, root = self.config, int(row.text[-1])
        if lattice is None:
            return LatticeTree.path(root)
        row.num_generated = lattice.num_generated
        with self._searching():
            mixed = PathScores(lattice, row.read_proxy(), row.text[-2:].tolist(), config.model_weight)
            if self._draws_tree(budget):
                return tree_over(mixed, root, min(self.drafter.generation_config.num_tree_nodes, budget.num_nodes))
            return LatticeTree.path(root, search_path(mixed, config.beam_width))

    def _draft(self, trees: list[LatticeTree], scores: list[Tensor], budget: DraftBudget, num_steps: int) -> Draft:
        """The draft of all rows; shorter rows end in nodes that belong to nobody."""
        pairs, device = zip(trees, scores, strict=True), self.drafter.device
        node_probs = [_node_probs(tree, part, budget) for tree, part in pairs] if budget.wants_node_probs else []
        return Draft(
            pad_sequence([torch.tensor(tree.token_ids) for tree in trees], True).to(device, non_blocking=True),
            pad_sequence([torch.tensor(tree.parents) for tree in trees], True, -1).to(device, non_blocking=True),
            num_passes=num_steps,
            node_probs=pad_sequence(node_probs, True) if node_probs else None,
            search_seconds=self._search_seconds,
            max_depth=max(max(tree.depths) for tree in trees),
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
        self.reader = DenoisedRow(drafter)
        self.draft_length = DraftLength.of(drafter.config)
        self.text = torch.empty(0, dtype=torch.long)  # all committed tokens
        self.num_generated: int | None = None  # of a draft that is not verified yet, the positions before its end
        self._proxy = None if drafter.proxy is None else drafter.proxy.in_context()
        self._num_counted = 0

    def take(self, text: Tensor, num_new: int) -> None:
        """All of the text, and how many tokens of it are new."""
        self.text = text
        if self.num_generated is not None and num_new:
            self.draft_length.observe(self.num_generated, num_new - 1)
        self.num_generated = None

    def num_positions(self, depth: int, num_below: int | None) -> int:
        """Positions to fill in; a path has no more than `num_below` nodes below the root."""
        most = min(depth, self.draft_length.length, self.reader.max_draft_tokens(len(self.text)))
        return most if num_below is None else min(most, num_below)

    def read_proxy(self) -> "ContextProxy | None":
        """The proxy, which has read all of the text; None without one."""
        if self._proxy is not None:
            self._proxy.update(self.text[self._num_counted :].tolist())
            self._num_counted = len(self.text)
        return self._proxy


def _node_probs(tree: LatticeTree, scores: Tensor, budget: DraftBudget) -> Tensor:
    """The diffusion model's probability of each node `[nodes]` of one row, 1 at the root."""
    probs = torch.softmax(scores / (budget.temperature or 1.0), dim=-1).cpu()
    below = probs[torch.tensor(tree.depths)[1:] - 1, torch.tensor(tree.token_ids)[1:]]
    return torch.cat([torch.ones(1, dtype=torch.float), below])


def _special_ids(config: "DiffusionConfig") -> tuple[list[int], list[int]]:
    """Tokens that end a text, and tokens that never follow one: the mask, and what begins or fills up texts."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    end_ids = [end for end in ends if end is not None and end < config.vocab_size]
    never = (config.mask_token_id, config.bos_token_id, config.pad_token_id)
    known = {token for token in never if token is not None and token < config.vocab_size}
    return end_ids, sorted(known - set(end_ids))
