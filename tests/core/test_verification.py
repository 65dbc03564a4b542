"""Token matching: against enumerating all paths, and its text's distribution against the target's own, exhaustively."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.core.strategies import few, parent_lists
from transformers_falcon_spec.core.sampling import choose
from transformers_falcon_spec.core.verification import AcceptedPath, TokenTree, match_tokens

VOCAB_SIZE = 3


@st.composite
def drafts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Parents, tokens that differ among siblings, and the target's choice after each node."""
    vocab_size = 5
    parents, token_ids = [-1], [0]
    for node in range(1, draw(st.integers(1, 14))):
        edges = [(parent, token) for parent in range(node) for token in range(vocab_size)]
        taken = set(zip(parents, token_ids, strict=True))
        parent, token = draw(st.sampled_from([edge for edge in edges if edge not in taken]))
        parents.append(parent)
        token_ids.append(token)
    choices = draw(st.lists(st.integers(0, vocab_size - 1), min_size=len(parents), max_size=len(parents)))
    return parents, token_ids, choices


@few
@given(drafts(), st.integers(1, 6))
def test_token_matching_keeps_the_path_that_agrees_longest(
    draft: tuple[list[int], list[int], list[int]], num_left: int
) -> None:
    parents, token_ids, choices = draft
    asked: list[int] = []

    def target_token(node: int) -> int:
        asked.append(node)
        return choices[node]

    accepted = match_tokens(TokenTree(parents, token_ids), target_token, max_tokens=num_left)

    path, committed = reference.walk(parents, token_ids, choices, lambda n: n == num_left)
    assert accepted == AcceptedPath(path, tuple(committed))
    assert asked == list(path)  # nothing else is ever asked of the target


def test_matching_goes_on_below_any_node() -> None:
    tree, choices = TokenTree([-1, 0, 1, 2], [4, 5, 6, 7]), [5, 6, 7, 8]

    whole, first = (match_tokens(tree, choices.__getitem__, max_tokens=num) for num in (None, 1))
    rest = match_tokens(tree, choices.__getitem__, start=1)

    assert first + rest == whole
    assert whole.cut(1) == first
    assert (whole.num_accepted, whole.token_ids[-1]) == (3, 8)


def test_root_alone_yields_the_bonus_token_alone() -> None:
    assert match_tokens(TokenTree([-1], [4]), lambda _node: 9) == AcceptedPath((0,), (9,))


def test_nodes_without_a_parent_are_nobodys_children() -> None:
    tree = TokenTree([-1, 0, -1], [4, 5, 9])

    accepted = match_tokens(tree, [5, 9, 0].__getitem__)

    assert accepted == AcceptedPath((0, 1), (5, 9))
    assert tree.depths == [0, 1, 0]


def _scores(text: Sequence[int]) -> torch.Tensor:
    """A target of three tokens: any deterministic function of the text will do."""
    seed = sum((token + 1) * 7**index for index, token in enumerate(text))
    return 2 * torch.randn(1, VOCAB_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _plain(num_tokens: int, draws: reference.ScriptedDraws) -> tuple[int, ...]:
    text = [0]
    while len(text) <= num_tokens:
        text.append(int(choose(_scores(text), True, draws)))
    return tuple(text)


def _drafted(num_tokens: int, parents: list[int], ranks: list[int], draws: reference.ScriptedDraws) -> tuple[int, ...]:
    text = [0]

    def target_token(_node: int) -> int:
        text.append(int(choose(_scores(text), True, draws)))
        return text[-1]

    while len(text) <= num_tokens:
        token_ids = [
            text[-1],
            *((rank + parent) % VOCAB_SIZE for parent, rank in zip(parents[1:], ranks[1:], strict=True)),
        ]
        match_tokens(TokenTree(parents, token_ids), target_token, max_tokens=num_tokens + 1 - len(text))
    return tuple(text)


@few
@given(parent_lists(max_nodes=6).filter(lambda parents: max(map(parents.count, parents)) <= VOCAB_SIZE))
def test_text_has_the_targets_own_distribution_whatever_the_tree(parents: list[int]) -> None:
    ranks = [parents[:node].count(parents[node]) for node in range(len(parents))]

    ours = reference.distribution(lambda draws: _drafted(3, parents, ranks, draws))

    plain = reference.distribution(lambda draws: _plain(3, draws))
    assert len(plain) == VOCAB_SIZE**3
    assert ours == pytest.approx(plain, rel=1e-12)
