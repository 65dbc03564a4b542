"""Masks against loops over every pair of positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.core.strategies import few, parent_lists
from transformers_falcon_spec import DraftTree
from transformers_falcon_spec.core.masks import additive, block_causal_mask, block_ends, slot_mask, tree_mask

NEAR = [{}, {"sliding_window": 1}, {"sliding_window": 3}, {"sliding_window": 99}, {"chunk_size": 4}]


@pytest.mark.parametrize("near", NEAR, ids=str)
@few
@given(parents=parent_lists(max_nodes=8), num_cached=st.integers(0, 9), num_padding=st.integers(0, 4))
def test_tree_mask_is_what_loops_say(
    near: dict[str, int], parents: list[int], num_cached: int, num_padding: int
) -> None:
    tree = DraftTree.from_lists(parents)
    cached = [slot - num_padding for slot in range(num_cached)]  # positions; those of padding are below 0
    held = [position >= 0 for position in cached]
    nodes = [max(num_cached - num_padding, 0) + depth for depth in tree.depths[0].tolist()]

    mask = tree_mask(
        tree.ancestor_mask,
        torch.tensor([nodes]),
        torch.tensor([cached], dtype=torch.long),
        torch.tensor([held], dtype=torch.bool),
        **near,
    )

    assert mask[0].tolist() == reference.tree_mask(parents, nodes, cached, held, **near)


def test_without_padding_every_cached_slot_is_seen() -> None:
    tree = DraftTree.from_lists([-1, 0, 0])

    cached = torch.arange(5)[None]
    mask = tree_mask(tree.ancestor_mask, torch.tensor([[5, 6, 6]]), cached, cached >= 0)

    assert mask[0, :, :5].all()
    assert mask[0, :, 5:].equal(tree.ancestor_mask[0])


def test_tree_mask_treats_each_row_by_itself() -> None:
    parents, nodes = torch.tensor([[-1, 0, 1], [-1, 0, 0]]), torch.tensor([[6, 7, 8], [4, 5, 5]])
    tree = DraftTree(parents, torch.zeros_like(parents))
    cached = torch.tensor([[0, 1, 2, 3, 4, 5], [-2, -1, 0, 1, 2, 3]])

    mask = tree_mask(tree.ancestor_mask, nodes, cached, cached >= 0, sliding_window=3)

    for row in range(2):
        lists = parents[row].tolist(), nodes[row].tolist(), cached[row].tolist(), (cached[row] >= 0).tolist()
        assert mask[row].tolist() == reference.tree_mask(*lists, sliding_window=3)


@pytest.mark.parametrize("near", NEAR, ids=str)
@pytest.mark.parametrize("num_spare", [0, 5])
@few
@given(parents=parent_lists(max_nodes=8), lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_slot_mask_is_what_loops_say_of_each_row_and_hides_what_stands_behind(
    near: dict[str, int], num_spare: int, parents: list[int], lengths: list[int]
) -> None:
    tree, num_rows, num_nodes = DraftTree.from_lists(parents), len(lengths), len(parents)
    ancestors, depths = tree.ancestor_mask.expand(num_rows, -1, -1), tree.depths.expand(num_rows, -1)

    mask = slot_mask(ancestors, depths, torch.tensor(lengths)[:, None], max(lengths) + num_nodes + num_spare, **near)

    for row, length in enumerate(lengths):
        nodes = [length + depth for depth in tree.depths[0].tolist()]
        end = length + num_nodes
        expected = reference.tree_mask(parents, nodes, range(length), [True] * length, **near)
        assert mask[row, :, :end].tolist() == expected
        assert not mask[row, :, end:].any()


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("phase", [0, 1, 2, 7])
def test_block_causal_mask_is_what_loops_say(block_size: int, phase: int) -> None:
    positions = torch.arange(9)

    ends = block_ends(positions[None], block_size, torch.tensor([phase]))
    mask = block_causal_mask(ends, positions)

    assert mask[0].tolist() == reference.block_causal_mask(range(9), range(9), block_size, phase)


def test_blocks_of_one_are_plain_causal_attention() -> None:
    positions = torch.arange(6)

    mask = block_causal_mask(block_ends(positions, 1, torch.tensor(0)), positions)

    assert mask.equal(torch.ones(6, 6, dtype=torch.bool).tril())


def test_each_row_of_a_batch_has_its_own_phase() -> None:
    positions, phases = torch.arange(7), torch.tensor([0, 1, 2])

    mask = block_causal_mask(block_ends(positions.expand(3, -1), 3, phases), positions)

    for row in range(3):
        assert mask[row].tolist() == reference.block_causal_mask(range(7), range(7), 3, row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_additive_is_zero_where_seen_and_the_lowest_number_elsewhere(dtype: torch.dtype) -> None:
    mask = torch.tensor([[[True, False], [True, True]]])

    bias = additive(mask, dtype)

    assert bias.dtype == dtype
    assert bias.tolist() == [[[[0.0, torch.finfo(dtype).min], [0.0, 0.0]]]]
