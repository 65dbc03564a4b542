"""A chain joined to trees: what the joined trees hold, and that no node has two children alike."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import few, parent_lists
from transformers_falcon_spec.core.tree import held_nodes, with_chain

Path = tuple[int, ...]


@st.composite
def tokens_of(draw: st.DrawFn, parents: list[int]) -> list[int]:
    """Tokens of few kinds, those of siblings distinct."""
    token_ids = [draw(st.integers(0, 3))]
    for node, parent in enumerate(parents[1:], start=1):
        taken = {token_ids[other] for other in range(1, node) if parents[other] == parent}
        token_ids.append(draw(st.integers(0, 20).filter(lambda token, taken=taken: token not in taken)))
    return token_ids


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Tokens and parents of some trees in as many nodes, and a chain for each, -1 behind its end."""
    trees = [draw(parent_lists()) for _ in range(draw(st.integers(1, 3)))]
    num_nodes, num_tokens = max(map(len, trees)), draw(st.integers(1, 6))
    token_ids = [draw(tokens_of(parents)) for parents in trees]
    chains = []
    for ids, parents in zip(token_ids, trees, strict=True):
        chain = draw(st.lists(st.integers(0, 3), max_size=num_tokens))
        if draw(st.booleans()):  # one that the tree holds at first
            chain = [*paths_of(ids, parents)[draw(st.integers(0, len(ids) - 1))], *chain][:num_tokens]
        chains.append(chain + [-1] * (num_tokens - len(chain)))
    filled = [parents + [-1] * (num_nodes - len(parents)) for parents in trees]
    return [ids + [0] * (num_nodes - len(ids)) for ids in token_ids], filled, chains


def paths_of(token_ids: list[int], parents: list[int]) -> list[Path]:
    """Tokens below the root down to each node, fillers left out."""
    paths: list[Path] = [()]
    by_node: dict[int, Path] = {0: ()}
    for node, parent in enumerate(parents[1:], start=1):
        if parent >= 0:
            by_node[node] = (*by_node[parent], token_ids[node])
            paths.append(by_node[node])
    return paths


@few
@given(rows())
def test_joined_trees_hold_every_path_of_both_once(drawn: tuple[list[list[int]], ...]) -> None:
    token_ids, parents, chains = drawn

    joined_ids, joined_parents, num_held = with_chain(*map(torch.tensor, drawn), depth=20)

    for row, chain in enumerate(chains):
        before, after = (
            paths_of(token_ids[row], parents[row]),
            paths_of(joined_ids[row].tolist(), joined_parents[row].tolist()),
        )
        chain_paths = [tuple(chain[:end]) for end in range(1, len(chain) + 1) if chain[end - 1] >= 0]
        new = [path for path in chain_paths if path not in before]
        assert after == before + new  # so that none is there twice: siblings differ
        assert int(num_held[row]) == len(chain_paths) - len(new)
        num_nodes = len(token_ids[row])
        is_filler = [parent < 0 for parent in joined_parents[row, num_nodes:].tolist()]
        assert is_filler == sorted(is_filler)  # the last ones


def test_only_so_many_tokens_are_looked_for_as_trees_are_deep() -> None:
    token_ids, parents, chain = torch.tensor([[5, 7, 9]]), torch.tensor([[-1, 0, 1]]), torch.tensor([[7, 9, 8]])

    assert held_nodes(token_ids, parents, chain).tolist() == [[1, 2, -1]]
    assert with_chain(token_ids, parents, chain, depth=2)[1].tolist() == [[-1, 0, 1, 2, -1, -1]]
    assert with_chain(token_ids[:, :1], parents[:, :1], chain, depth=0)[1].tolist() == [[-1, 0, 1, 2]]
