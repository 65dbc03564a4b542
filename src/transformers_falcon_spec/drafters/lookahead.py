"""Lookahead Decoding: drafts from n-grams of the text and of a Jacobi window, without training (arXiv 2402.02057).

n-grams that begin with the root are guessed; lookahead nodes find new ones: what the target puts after them moves the
window and yields n-grams. No pass of any model is spent on a draft.

The Jacobi window holds guesses for coming positions, which the target reads again in every step. Its tokens form a
comb below the root: the oldest guesses are the spine, and below each node of the spine hang the later guesses for the
positions after it. Ancestors are all that a node sees, and in this comb they are what the paper's mask shows (section
3 and figure 2; start and movement as in the code published with it).
"""

from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.dataclasses import strict

from ..core.options import option
from ..core.sampling import draw_indices
from ..generation.drafting import Committed, Draft, DraftBudget, TargetView, TreeCandidateGenerator
from .base import DrafterModel
from .config_fields import DrafterConfig

SETTINGS = ("window_size", "ngram_len", "num_guesses", "pool_size")  # decide what is drafted


@strict
class LookaheadConfig(DrafterConfig):
    """Configuration of [`LookaheadDrafter`]; the defaults are what the paper takes for a target of 7B parameters.

    A step reads `(ngram_len - 1) * window_size - 1` lookahead nodes and up to `num_guesses * (ngram_len - 1)` guessed
    tokens.

    Args:
        window_size (`int`, *optional*, defaults to 15): Columns of the Jacobi window; W in the paper.
        ngram_len (`int`, *optional*, defaults to 5): Tokens of an n-gram, the one it is found by included; N in the
            paper. Drafts are one token shorter.
        num_guesses (`int`, *optional*, defaults to 15): n-grams guessed in a step, the newest ones; G in the paper.
        pool_size (`int`, *optional*, defaults to 16384): n-grams kept for each row; the one unseen for longest goes
            first.
        vocab_size (`int`, *optional*): Size of the target's vocabulary.
        target_name_or_path (`str`, *optional*): The target that the sizes were taken from; any other of them will do.

    Example:

    ```python
    >>> LookaheadConfig(window_size=5, ngram_len=3, vocab_size=100).num_guesses
    15

    ```
    """

    model_type = "lookahead_spec"

    window_size: int = option(15, least=1)
    ngram_len: int = option(5, least=2)
    num_guesses: int = option(15, least=1)
    pool_size: int = option(16384, least=1)
    vocab_size: int | None = None  # type: ignore[assignment]  # options alone may be made for any target


class LookaheadDrafter(DrafterModel):
    """A drafter of n-grams that were seen in the text or in a Jacobi window, which the target reads with the draft.

    There is nothing to train and nothing to load but options, so one made for a vocabulary serves every target with
    it.

    Example:

    ```python
    >>> drafter = LookaheadDrafter(LookaheadConfig(window_size=5, ngram_len=3, num_guesses=5, vocab_size=100))
    >>> drafter.num_parameters(), drafter.feature_layers, drafter.num_nodes
    (0, (), 20)

    ```
    """

    config: LookaheadConfig
    config_class = LookaheadConfig

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        marker = torch.empty(0)  # knows device and type, as weights would
        self.register_buffer("device_marker", marker, persistent=False)
        self.post_init()

    @property
    def device(self) -> torch.device:
        """Where drafts are made."""
        return self.get_buffer("device_marker").device

    @property
    def dtype(self) -> torch.dtype:
        """The type that was set; nothing is computed in it."""
        return self.get_buffer("device_marker").dtype

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft, root and lookahead nodes included."""
        return (self.config.num_guesses + self.config.window_size) * (self.config.ngram_len - 1)

    @property
    def draft_settings(self) -> dict[str, int]:
        """Settings that decide its drafts."""
        return {name: getattr(self.config, name) for name in SETTINGS}

    @classmethod
    def _load_model(cls, name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load options alone, by stock loading with an empty set of weights."""
        config, dtype = kwargs.pop("config", None), kwargs.pop("dtype", None)  # a config would keep "auto" as a type
        if config is None:
            config, kwargs = LookaheadConfig.from_pretrained(name_or_path, return_unused_kwargs=True, **kwargs)

        return super()._load_model(None, *args, config=config, state_dict={}, dtype=dtype or "auto", **kwargs)


Tokens = tuple[int, ...]


class NgramPool:
    """The newest `pool_size` n-grams of one row; those that come again are new again.

    Example:

    ```python
    >>> pool = NgramPool(pool_size=2)
    >>> for ngram in [(1, 2, 3), (1, 4, 5), (1, 2, 3), (7, 8, 9)]:
    ...     pool.add(ngram)
    >>> pool.continuations(1, 5), pool.continuations(7, 5)
    ([(2, 3)], [(8, 9)])

    ```
    """

    def __init__(self, pool_size: int) -> None:
        self.pool_size = pool_size
        self._ngrams: dict[Tokens, None] = {}  # an ordered set, oldest first
        self._by_first: dict[int, dict[Tokens, None]] = {}

    def add(self, ngram: Tokens) -> None:
        """Take one in, or make it the newest."""
        if ngram in self._ngrams:
            self._forget(ngram)

        self._ngrams[ngram] = None
        self._by_first.setdefault(ngram[0], {})[ngram[1:]] = None
        if len(self._ngrams) > self.pool_size:
            self._forget(next(iter(self._ngrams)))

    def add_text(self, token_ids: Sequence[int], ngram_len: int) -> None:
        """Take in every n-gram of a text."""
        for start in range(len(token_ids) - ngram_len + 1):
            self.add(tuple(token_ids[start : start + ngram_len]))

    def continuations(self, first: int, num_guesses: int) -> list[Tokens]:
        """The n-grams that begin with `first`, without that token, newest first."""
        return list(self._by_first.get(first, {}))[: -num_guesses - 1 : -1]

    def _forget(self, ngram: Tokens) -> None:
        del self._ngrams[ngram]
        del self._by_first[ngram[0]][ngram[1:]]
        if not self._by_first[ngram[0]]:
            del self._by_first[ngram[0]]


def prefix_tree(continuations: Sequence[Tokens], max_depth: int, num_nodes: int) -> list[tuple[int, int]]:
    """Parent and token of each node below a root, at most `num_nodes` of them; what continuations share is one path.

    ```python
    >>> prefix_tree([(5, 6, 7), (5, 8, 7)], max_depth=2, num_nodes=9)
    [(0, 5), (1, 6), (1, 8)]

    ```
    """
    nodes: dict[Tokens, int] = {(): 0}
    for continuation in continuations:
        for depth in range(1, min(len(continuation), max_depth) + 1):
            if len(nodes) <= num_nodes:
                nodes.setdefault(continuation[:depth], len(nodes))

    return [(nodes[prefix[:-1]], prefix[-1]) for prefix in list(nodes)[1:]]


def num_first_tokens(window_size: int, ngram_len: int) -> int:
    """Tokens that a window starts from; also the depth of its comb, at any time."""
    return window_size + ngram_len - 3


class JacobiWindow:
    """The window of one row. Level 0 is the spine, one token shorter than the others: its first node is the root.

    A fresh window has the spine alone, of [`num_first_tokens`] tokens, and each step adds a level until there are
    `ngram_len - 1`. From then on each step yields an n-gram for every column, and the oldest level goes.

    Example:

    ```python
    >>> window = JacobiWindow(3, first_tokens=[7, 8])
    >>> window.advance(root=5, choices=[1, 2, 3]), window.levels
    ([], [[8], [2, 3]])
    >>> window.parents, window.tokens, window.tips
    ([0, 0, 1], [8, 2, 3], [2, 3])
    >>> window.advance(root=1, choices=[4, 6]), window.levels
    ([(1, 2, 4), (8, 3, 6)], [[3], [4, 6]])

    ```
    """

    def __init__(self, ngram_len: int, first_tokens: Sequence[int]) -> None:
        self.ngram_len = ngram_len
        self.levels = [list(first_tokens)]

    @property
    def tokens(self) -> list[int]:
        """The token of every node, the root excluded: level after level."""
        return [token for level in self.levels for token in level]

    @property
    def parents(self) -> list[int]:
        """The parent of every node; the root is 0, nodes count from 1."""
        num_below = len(self.tokens) - len(self.levels[0])
        return [*range(len(self.levels[0])), *range(num_below)]

    @property
    def tips(self) -> list[int]:
        """The newest node of every column; where there is the spine alone, the spine itself, root first."""
        num_nodes = len(self.tokens) + 1
        return list(range(num_nodes))[-len(self.levels[0]) - 1 :]

    def advance(self, root: int, choices: Sequence[int]) -> list[Tokens]:
        """Move one step: `choices` are what the target puts after the tips. Returns the n-grams that this makes."""
        stack = [*self.levels, list(choices)]
        if len(stack) < self.ngram_len:
            self.levels = [level[1:] for level in stack]
            return []

        self.levels = [stack[1][1:], *stack[2:]]
        return list(zip([root, *stack[0]], *stack[1:], strict=True))


Node = tuple[int, int, bool]  # its token, its parent, and whether it is a lookahead node
FILLER = (0, -1, False)  # belongs to nobody


class LookaheadCandidateGenerator(TreeCandidateGenerator):
    """One call's drafting with a [`LookaheadDrafter`]; every row has a pool and a window of its own."""

    wants_node_choices = True

    def __init__(self, drafter: LookaheadDrafter, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self.config = drafter.config
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

        for nodes in rows:
            nodes.extend([FILLER] * (num_nodes - len(nodes)))

        token_ids, parents, is_lookahead = torch.tensor(rows, device=self.drafter.device).unbind(-1)
        return Draft(token_ids, parents, is_lookahead.bool(), num_passes=0)

    def _catch_up(self) -> None:
        """Learn from what was committed since the last proposal."""
        for committed in self._pending:
            if not self._rows:
                self._rows = [_Row(self) for _ in committed.lengths]

            for number, row in enumerate(self._rows):
                if row.tips:  # the newest draft held the window
                    assert committed.node_choices is not None  # the loop gives what a generator wants
                    choices = committed.node_choices[number]
                    if max(row.tips) < len(choices):
                        row.learn_choices(choices[row.tips].tolist())
                    else:  # the draft overflowed, and the root was read without it
                        row.drop_window()

                unread = committed.sequence_ids[number, row.num_read : committed.lengths[number]]
                row.learn_text(unread.tolist())

        self._pending = []


class _Row:
    """The n-gram pool and the Jacobi window of one row."""

    def __init__(self, generator: LookaheadCandidateGenerator) -> None:
        self.config = generator.config
        self.rng = generator.rng
        self.pool = NgramPool(self.config.pool_size)
        self.tips: list[int] = []  # nodes of the newest draft whose choices the window waits for
        self.num_read = 0  # tokens of the text in the pool
        self._newest: list[int] = []  # what an n-gram of coming tokens may begin with; the last one is the root
        self._window: Any = None  # a `JacobiWindow`, as soon as there is text

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
        for ngram in self._window.advance(self._newest[-1], choices):
            self.pool.add(ngram)

        self.tips = []

    def drop_window(self) -> None:
        """Let the next text start another window."""
        self.tips = []
        self._window = None

    def nodes(self, max_depth: int, budget: DraftBudget) -> list[Node]:
        """The root, guesses, then lookahead nodes, within the limits.

        The window is read whole or not at all, and only where trees may branch.
        """
        config = self.config
        window = self._window
        tokens = window.tokens
        depth = num_first_tokens(config.window_size, config.ngram_len)
        has_window = not budget.is_chain and depth <= max_depth and len(tokens) < budget.num_nodes

        guesses = self.pool.continuations(self._newest[-1], 1 if budget.is_chain else config.num_guesses)
        guessed = prefix_tree(guesses, max_depth, budget.num_nodes - 1 - len(tokens) * has_window)
        nodes: list[Node] = [(self._newest[-1], -1, False)]
        for parent, token in guessed:
            nodes.append((token, parent, False))

        if has_window:
            num_before = len(guessed)  # nodes of the window stand behind them, but for the root
            self.tips = [tip and tip + num_before for tip in window.tips]
            for token, parent in zip(tokens, window.parents, strict=True):
                nodes.append((token, parent and parent + num_before, True))

        return nodes


LookaheadDrafter.generator_class = LookaheadCandidateGenerator
