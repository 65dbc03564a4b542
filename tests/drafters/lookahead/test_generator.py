"""Drafting from n-grams: the generator against its naive twin, what lookahead nodes see, and the limits it keeps."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from transformers_falcon_spec import Draft, LookaheadConfig, LookaheadDrafter
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.drafters.lookahead import JacobiWindow, NgramPool, num_first_tokens
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget

Path = tuple[int, ...]


def choose(path: Sequence[int]) -> int:
    """A target with few tokens that looks two tokens back: its text repeats itself."""
    return (3 * path[-1] + sum(path[-2:]) // 2 + 1) % 7


class Rows:
    """Texts of several rows, written by the target above with a generator's drafts, or without."""

    def __init__(self, generator: Any, prompts: Sequence[Sequence[int]]) -> None:
        self.generator, self.texts = generator, [list(prompt) for prompt in prompts]
        self.num_new = [len(prompt) - 1 for prompt in prompts]
        self.commit(None)

    def commit(self, choices: torch.Tensor | None) -> None:
        """Give the generator what is new."""
        lengths = tuple(map(len, self.texts))
        ids = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in self.texts])
        self.generator.commit(Committed(ids, lengths, tuple(self.num_new), None, choices))

    def step(self, draft: Draft | None) -> None:
        """The target reads a draft, keeps what it would have written, and says what it puts after every node."""
        if draft is None:
            draft = Draft(torch.tensor([text[-1:] for text in self.texts]), torch.full((len(self.texts), 1), -1))
        choices = torch.zeros_like(draft.token_ids)
        for row, text in enumerate(self.texts):
            parents, token_ids = draft.parents[row].tolist(), draft.token_ids[row].tolist()
            after = [choose(text[:-1] + tokens) for tokens in paths(parents, token_ids)]
            choices[row] = torch.tensor(after)
            allowed = [
                -1 if draft.is_lookahead is not None and draft.is_lookahead[row, node] else parent
                for node, parent in enumerate(parents)
            ]
            _kept, new = reference.walk(allowed, token_ids, after, lambda _: False)
            self.num_new[row] = len(new)
            self.texts[row] += new
        self.commit(choices)


def paths(parents: Sequence[int], token_ids: Sequence[int]) -> list[list[int]]:
    """The tokens from the root to each node."""
    return [[token_ids[above] for above in reference.path_to(parents, node)] for node in range(len(parents))]


def start(prompts: Sequence[Sequence[int]], **options: int) -> Rows:
    drafter = LookaheadDrafter(LookaheadConfig(**options))
    return Rows(drafter.candidate_generator(None, 1000, torch.Generator().manual_seed(0)), prompts)


def first_spines(rows: Rows) -> list[list[int]]:
    """What the windows start from; it is drawn, so the twin gets it."""
    rows.generator._catch_up()
    return [list(row._window.levels[0]) for row in rows.generator._rows]


def candidates(draft: Draft, row: int) -> list[Path]:
    """Tokens below the root of each node that could become text."""
    found = paths(draft.parents[row].tolist(), draft.token_ids[row].tolist())
    is_candidate = (draft.parents[row] >= 0) & ~draft.is_lookahead[row]
    return [tuple(found[node][1:]) for node in range(len(found)) if is_candidate[node]]


def lookahead_nodes(draft: Draft, row: int) -> list[Path]:
    found = paths(draft.parents[row].tolist(), draft.token_ids[row].tolist())
    return [
        tuple(path) for path, is_lookahead in zip(found, draft.is_lookahead[row].tolist(), strict=True) if is_lookahead
    ]


@given(
    window_size=st.integers(1, 5),
    ngram_len=st.integers(2, 5),
    num_guesses=st.integers(1, 4),
    pool_size=st.integers(1, 40),
    prompts=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=12), min_size=1, max_size=3),
    has_draft=st.lists(st.booleans(), min_size=4, max_size=12),
)
def test_pool_and_window_are_those_of_the_naive_twin(
    window_size: int, ngram_len: int, num_guesses: int, pool_size: int, prompts: Any, has_draft: list[bool]
) -> None:
    options = {"window_size": window_size, "num_guesses": num_guesses, "pool_size": pool_size}
    rows = start(prompts, ngram_len=ngram_len, **options)
    twins = [reference.NaiveLookahead(window_size, ngram_len, spine) for spine in first_spines(rows)]
    num_read = [0] * len(twins)

    for is_drafted in [*has_draft, True]:
        for row, twin in enumerate(twins):
            twin.read(rows.texts[row][num_read[row] :])
            num_read[row] = len(rows.texts[row])
        draft = rows.generator.propose(DraftBudget((100,) * len(twins), 512)) if is_drafted else None
        for row, twin in enumerate(twins if draft is not None else []):
            guessed = twin.guessed(num_guesses, pool_size)
            found = candidates(draft, row)
            assert len(set(found)) == len(found)  # siblings differ
            assert set(found) == {guess[:depth] for guess in guessed for depth in range(1, ngram_len)}
            read = [path for path, _ in twin.columns()]
            assert set(lookahead_nodes(draft, row)) == {
                path[:depth] for path in read for depth in range(2, len(path) + 1)
            }
        if is_drafted:  # the root is read even where there is nothing else
            for row, twin in enumerate(twins):
                twin.advance(lambda path, text=rows.texts[row]: choose([*text[:-1], *path]))
        rows.step(draft)


@pytest.mark.parametrize(("window_size", "ngram_len"), [(1, 2), (1, 4), (3, 2), (4, 3), (5, 5)])
def test_lookahead_nodes_see_what_the_mask_of_the_paper_shows(window_size: int, ngram_len: int) -> None:
    window = JacobiWindow(ngram_len, range(num_first_tokens(window_size, ngram_len)))
    for _ in range(ngram_len - 2):
        window.advance(0, window.tips)

    tree = DraftTree.from_lists([-1, *window.parents])

    columns = [
        (0, column) for column in range(window_size)
    ]  # level and column of each node; the first one is the root
    columns += [(level, column) for level in range(1, ngram_len - 1) for column in range(window_size)]
    for node, (level, column) in enumerate(columns):
        for other, (above, seen) in enumerate(columns):
            is_seen = seen <= column if above == 0 else seen == column and above <= level
            assert tree.ancestor_mask[0, node, other] == is_seen
    assert tree.depths[0].tolist() == [level + column for level, column in columns]
    assert len(tree) == (ngram_len - 1) * window_size


def test_a_text_that_repeats_itself_is_guessed_at_once() -> None:
    rows = start([[1, 2, 3, 4, 5, 1]], window_size=2, ngram_len=4, num_guesses=3)

    draft = rows.generator.propose(DraftBudget((9,), 512))

    assert candidates(draft, 0) == [(2,), (2, 3), (2, 3, 4)]
    assert draft.num_passes == 0


def test_rows_learn_from_their_own_text_alone() -> None:
    rows = start([[1, 2, 3, 1], [1, 5, 6, 1], [9]], window_size=1, ngram_len=3)

    draft = rows.generator.propose(DraftBudget((9, 9, 9), 512))

    assert [candidates(draft, row) for row in range(3)] == [[(2,), (2, 3)], [(5,), (5, 6)], []]


def test_the_newest_guesses_come_first_and_share_their_beginnings() -> None:
    rows = start([[1, 2, 3, 1, 2, 4, 1, 5, 6, 1]], window_size=1, ngram_len=3, num_guesses=2)

    draft = rows.generator.propose(DraftBudget((9,), 512))

    assert candidates(draft, 0) == [(5,), (5, 6), (2,), (2, 4)]


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 9, 20])
@pytest.mark.parametrize("max_depth", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("is_chain", [False, True])
def test_a_draft_keeps_within_its_budget(num_nodes: int, max_depth: int, is_chain: bool) -> None:
    rows = start([[1, 2, 3, 1, 2, 4, 1, 5, 6, 1]], window_size=3, ngram_len=4)  # the window is 4 deep and has 4 nodes

    draft = rows.generator.propose(DraftBudget((max_depth,), num_nodes, is_chain=is_chain))

    if min(num_nodes - 1, max_depth) == 0:
        assert draft is None
        return
    tree = DraftTree.from_lists(draft.parents[0].tolist())
    assert len(tree) <= num_nodes
    assert int(tree.depths.max()) <= max_depth
    assert len(lookahead_nodes(draft, 0)) == (4 if max_depth >= 4 and num_nodes >= 5 and not is_chain else 0)
    assert not is_chain or len(tree.path_to(len(tree) - 1)) == len(tree)


def test_a_row_that_has_ended_gets_nothing() -> None:
    rows = start([[1, 2, 3, 1], [1, 2, 3, 1]], window_size=2, ngram_len=3)

    draft = rows.generator.propose(DraftBudget((9, 0), 512))

    assert (draft.parents[0] >= 0).any()
    assert draft.parents[1].tolist() == [-1] * draft.parents.shape[1]
    assert not draft.is_lookahead[1].any()


def test_the_pool_forgets_what_was_unseen_for_longest() -> None:
    pool = NgramPool(pool_size=3)

    pool.add_text([1, 2, 1, 3, 1, 2, 4], ngram_len=2)

    assert [pool.continuations(first, 9) for first in (1, 2, 3)] == [[(2,)], [(4,)], [(1,)]]


def test_a_commit_stores_and_leaves_the_reading_to_the_proposal() -> None:
    rows = start([[1, 2, 3]], window_size=2, ngram_len=3)

    assert rows.generator._rows == []
