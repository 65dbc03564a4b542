"""Drafting with Lookahead: n-grams that begin with the root are guessed; lookahead nodes find new ones.

What the target puts after the lookahead nodes moves the window and yields new n-grams. No pass of any model is spent
on a draft.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...core.sampling import draw_indices
from ...generation.drafting import Committed, Draft, DraftBudget, TargetView, TreeCandidateGenerator
from .ngram_pool import NgramPool, prefix_tree
from .window import JacobiWindow, num_first_tokens

if TYPE_CHECKING:
    from .modeling_lookahead import LookaheadDrafter

Node = tuple[int, int, bool]  # its token, its parent, and whether it is a lookahead node
FILLER = (0, -1, False)  # belongs to nobody


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

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self._catch_up()
        self._rows = [self._rows[row] for row in rows]

    def propose(self, budget: DraftBudget) -> Draft | None:
        """The newest n-grams after each row's root, and its window; None where no row has either."""
        self._catch_up()
        rows = [row.nodes(depth, budget) for row, depth in zip(self._rows, budget.depths, strict=True)]
        num_nodes = max(map(len, rows))
        if num_nodes == 1:
            return None
        filled = [nodes + [FILLER] * (num_nodes - len(nodes)) for nodes in rows]
        token_ids, parents, is_lookahead = torch.tensor(filled, device=self.drafter.device).unbind(-1)
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
                    if max(row.tips) < len(choices[number]):
                        row.learn_choices([choices[number][tip] for tip in row.tips])
                    else:  # the draft overflowed, and the root was read without it
                        row.drop_window()
                unread = committed.sequence_ids[number, row.num_read : committed.lengths[number]]
                row.learn_text(unread.tolist())
        self._pending = []


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
        """Take in new tokens; the first ones, and the newest ones before them, start the window, in another order."""
        self.num_read += len(token_ids)
        text = self._newest + token_ids
        if self._window is None:
            num_tokens = num_first_tokens(self.config.window_size, self.config.ngram_len)
            indices = draw_indices(len(text), num_tokens, self.rng).tolist()
            self._window = JacobiWindow(self.config.ngram_len, [text[index] for index in indices])
        self.pool.add_text(text, self.config.ngram_len)
        self._newest = text[1 - self.config.ngram_len :]

    def learn_choices(self, choices: list[int]) -> None:
        """Move the window; its n-grams start from the root of the newest draft."""
        assert self._window is not None  # it was read
        for ngram in self._window.advance(self._newest[-1], choices):
            self.pool.add(ngram)
        self.tips = []

    def drop_window(self) -> None:
        """Let the next text start another window."""
        self.tips, self._window = [], None

    def nodes(self, max_depth: int, budget: DraftBudget) -> list[Node]:
        """The root, guesses, then lookahead nodes, within the limits.

        The window is read whole or not at all, and only where trees may branch.
        """
        assert self._window is not None  # text came first
        config, window, tokens = self.config, self._window, self._window.tokens
        depth = num_first_tokens(config.window_size, config.ngram_len)
        has_window = not budget.is_chain and depth <= max_depth and len(tokens) < budget.num_nodes
        guesses = self.pool.continuations(self._newest[-1], 1 if budget.is_chain else config.num_guesses)
        guessed = prefix_tree(guesses, max_depth, budget.num_nodes - 1 - len(tokens) * has_window)
        nodes = [(self._newest[-1], -1, False), *((token, parent, False) for parent, token in guessed)]
        if has_window:
            num_before = len(guessed)
            self.tips = [tip and tip + num_before for tip in window.tips]
            below = [parent and parent + num_before for parent in window.parents]
            nodes += [(token, parent, True) for token, parent in zip(tokens, below, strict=True)]
        return nodes
