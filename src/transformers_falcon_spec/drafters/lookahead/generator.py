"""Drafting with Lookahead: n-grams that begin with the root are guessed; lookahead nodes find new ones.

What the target puts after the lookahead nodes moves the window and yields new n-grams. No pass of any model is spent
on a draft.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...core.sampling import draw_indices
from ...generation.drafting import Committed, Draft, DraftBudget, TargetView, TreeCandidateGenerator
from .ngram_pool import NgramPool, prefix_tree
from .window import JacobiWindow, num_first_tokens

if TYPE_CHECKING:
    from .modeling_lookahead import LookaheadDrafter


class LookaheadCandidateGenerator(TreeCandidateGenerator):
    """One call's drafting with a [`LookaheadDrafter`]; every row has a pool and a window of its own."""

    feature_layers = ()
    wants_node_choices = True

    def __init__(self, drafter: "LookaheadDrafter", target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(target, max_length, rng)
        self.drafter, self.config = drafter, drafter.config
        self._pending: list[Committed] = []
        self._rows: list[_Row] = []

    def commit(self, committed: Committed) -> None:
        """Keep the target's choices after the newest draft, and the newest text, for the next proposal."""
        self._pending = [*self._pending[:1], committed]

    def propose(self, budget: DraftBudget) -> Draft | None:
        """The newest n-grams after each row's root, and its window; None where no row has either."""
        self._catch_up()
        trees = [row.tree(depth, budget) for row, depth in zip(self._rows, budget.depths, strict=True)]
        num_nodes = max(len(tree.parents) for tree in trees)
        if num_nodes == 1:
            return None
        padded = [tree.padded(num_nodes) for tree in trees]
        token_ids, parents, is_lookahead = torch.tensor(padded, device=self.drafter.device).unbind(1)
        return Draft(token_ids, parents, is_lookahead.bool(), num_passes=0)

    def _catch_up(self) -> None:
        """Learn from what was committed since the last proposal."""
        for committed in self._pending:
            if not self._rows:
                self._rows = [_Row(self) for _ in committed.lengths]
            choices = None if committed.node_choices is None else committed.node_choices.tolist()
            for number, row in enumerate(self._rows):
                if row.tips:  # the newest draft held the window
                    assert choices is not None  # the loop gives what a generator wants
                    row.learn_choices([choices[number][tip] for tip in row.tips])
                unread = committed.sequence_ids[number, row.num_read : committed.lengths[number]]
                row.learn_text(unread.tolist())
        self._pending = []


@dataclass(frozen=True)
class _Tree:
    """One row's draft: the root, the guessed tokens, then the lookahead nodes."""

    token_ids: list[int]
    parents: list[int]
    num_lookahead_nodes: int

    def padded(self, num_nodes: int) -> tuple[list[int], list[int], list[int]]:
        """Tokens, parents, and 1 for lookahead nodes, with nodes that belong to nobody behind them."""
        num_candidates, num_missing = len(self.parents) - self.num_lookahead_nodes, num_nodes - len(self.parents)
        is_lookahead = [0] * num_candidates + [1] * self.num_lookahead_nodes + [0] * num_missing
        return self.token_ids + [0] * num_missing, self.parents + [-1] * num_missing, is_lookahead


class _Row:
    """The n-gram pool and the Jacobi window of one row."""

    def __init__(self, generator: LookaheadCandidateGenerator) -> None:
        self.config, self.rng = generator.config, generator.rng
        self.pool = NgramPool(self.config.pool_size)
        self.tips: list[int] = []  # nodes of the newest draft whose choices the window waits for
        self.num_read = 0  # tokens of the text in the pool
        self._newest: list[int] = []  # what an n-gram of coming tokens may begin with; the last one is the root
        self._window: JacobiWindow | None = None

    def learn_text(self, token_ids: list[int]) -> None:
        """Take in new tokens; the first ones start the window, in another order."""
        self.num_read += len(token_ids)
        if self._window is None:
            num_tokens = num_first_tokens(self.config.window_size, self.config.ngram_len)
            indices = draw_indices(len(token_ids), num_tokens, self.rng).tolist()
            self._window = JacobiWindow(self.config.ngram_len, [token_ids[index] for index in indices])
        text = self._newest + token_ids
        self.pool.add_text(text, self.config.ngram_len)
        self._newest = text[1 - self.config.ngram_len :]

    def learn_choices(self, choices: list[int]) -> None:
        """Move the window; its n-grams start from the root of the newest draft."""
        assert self._window is not None  # it was read
        for ngram in self._window.advance(self._newest[-1], choices):
            self.pool.add(ngram)
        self.tips = []

    def tree(self, max_depth: int, budget: DraftBudget) -> _Tree:
        """The draft within the limits. The window is read whole or not at all, and only where trees may branch."""
        assert self._window is not None  # text came first
        root, config = self._newest[-1], self.config
        window = self._window
        depth = num_first_tokens(config.window_size, config.ngram_len)
        has_window = not budget.is_chain and depth <= max_depth and len(window.tokens) < budget.num_nodes
        num_lookahead_nodes = len(window.tokens) if has_window else 0
        guesses = self.pool.continuations(root, 1 if budget.is_chain else config.num_guesses)
        parents, tokens = prefix_tree(guesses, max_depth, budget.num_nodes - 1 - num_lookahead_nodes)
        if not has_window:
            return _Tree([root, *tokens], [-1, *parents], 0)
        num_before = len(parents)
        self.tips = [tip and tip + num_before for tip in window.tips]
        below = [parent and parent + num_before for parent in window.parents]
        return _Tree([root, *tokens, *window.tokens], [-1, *parents, *below], num_lookahead_nodes)
