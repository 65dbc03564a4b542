"""The plan of a tree: how many passes, which blocks each one feeds, and whom they see."""

import math

import pytest
import torch

from tests.drafters.trees import random_tree
from tests.reference import path_to
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import DraftTree
from transformers_falcon_spec.drafters.tree_drafting.block_passes import DraftPass, draft_passes

CPU = torch.device("cpu")


def level_tree(levels: list[tuple[int, int]]) -> DraftTree:
    """For each depth so many nodes, spread evenly over the first so many nodes of the depth above."""
    parents, above = [-1], [0]
    for num_nodes, num_parents in levels:
        chosen = sorted(above[index % num_parents] for index in range(num_nodes))
        above = list(range(len(parents), len(parents) + num_nodes))
        parents += chosen
    return DraftTree.from_lists(parents)


# Nodes at each depth, and how many nodes above have children: two trees of the reference code, for k = 2.
COMPLEX = [(4, 1), (9, 4), (18, 9), (22, 18), (11, 5), (14, 11), (11, 6), (11, 11)]
EIGHT_DEEP = [(20, 1), (15, 15), (19, 7), (23, 19), (21, 11), (23, 21), (21, 12), (23, 21)]


@pytest.mark.parametrize(
    ("levels", "num_nodes", "num_fed"), [(COMPLEX, 100, [0, 9, 5, 6]), (EIGHT_DEEP, 165, [0, 7, 11, 12])]
)
def test_a_tree_of_depth_8_takes_4_passes_and_feeds_the_inner_nodes_of_every_second_depth(
    levels: list[tuple[int, int]], num_nodes: int, num_fed: list[int]
) -> None:
    tree = level_tree(levels)

    passes = draft_passes(tree, 2, CPU)

    per_depth = [count for count, _ in levels]
    assert [len(each.drafted.nodes) for each in passes] == [
        sum(per_depth[depth : depth + 2]) for depth in (0, 2, 4, 6)
    ]
    assert [each.fed_nodes.numel() // 2 for each in passes] == num_fed
    assert len(tree) - 1 == num_nodes


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_every_node_takes_its_token_from_the_block_that_ends_its_path(block_size: int, seed: int) -> None:
    parents, ranks = random_tree(3 * block_size, 30, seed)
    tree = DraftTree.from_lists(parents, ranks)

    passes = draft_passes(tree, block_size, CPU)

    assert sorted(node for each in passes for node in each.drafted.nodes.tolist()) == list(range(1, len(tree)))
    for number, each in enumerate(passes):
        for node, rows, rank in zip(each.drafted.nodes.tolist(), *each.drafted.sources.tolist(), strict=True):
            path = path_to(parents, node)[1:]
            block, row = divmod(rows, block_size)
            assert math.ceil(len(path) / block_size) == number + 1
            assert row == (len(path) - 1) % block_size
            assert rank == ranks[node] < each.drafted.num_ranks
            assert path[: number * block_size] == held_path(passes, number, block)


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_block_sees_the_blocks_on_its_path_and_no_other(block_size: int, seed: int) -> None:
    tree = DraftTree.from_lists(*random_tree(4 * block_size, 40, seed))
    passes = draft_passes(tree, block_size, CPU)
    paths = [
        held_path(passes, number, block)
        for number in range(1, len(passes))
        for block in range(num_blocks(passes[number]))
    ]

    for number in range(1, len(passes)):
        for block in range(num_blocks(passes[number])):
            own = held_path(passes, number, block)
            rows = passes[number].tail_mask[block * block_size : (block + 1) * block_size]

            seen = [path == own[: len(path)] for path in paths[: rows.shape[1] // block_size]]

            assert rows.tolist() == [[each for each in seen for _ in range(block_size)]] * block_size


def num_blocks(each: DraftPass) -> int:
    return len(each.fed_nodes)


def held_path(passes: tuple[DraftPass, ...], number: int, block: int) -> tuple[int, ...]:
    """Nodes of a block and of those that it continues, root excluded."""
    held: tuple[int, ...] = ()
    for each in reversed(passes[1 : number + 1]):
        held = (*each.fed_nodes[block].tolist(), *held)
        block = int(each.parent_blocks[block])
    return held


@pytest.mark.parametrize(
    ("depth", "block_size", "num_passes"), [(1, 2, 1), (2, 2, 1), (3, 2, 2), (6, 3, 2), (5, 1, 5), (3, 8, 1)]
)
def test_a_chain_takes_as_many_passes_as_its_depth_has_blocks(depth: int, block_size: int, num_passes: int) -> None:
    passes = draft_passes(DraftTree.chain(depth), block_size, CPU)

    assert len(passes) == num_passes


def test_a_root_alone_takes_no_pass() -> None:
    assert draft_passes(DraftTree.from_lists([-1]), 2, CPU) == ()


def test_the_plan_of_a_stored_tree_is_made_once_for_all_calls() -> None:
    drafter = make_drafter(make_target(), block_size=2)
    drafter.generation_config.draft_tree = DraftTree.from_lists([-1, 0, 0, 1, 3]).to_json()

    plans = [draft_passes(drafter.draft_tree, 2, CPU) for _ in range(2)]

    assert plans[0] is plans[1]
