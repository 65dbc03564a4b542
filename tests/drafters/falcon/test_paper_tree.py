"""The tree of the Falcon paper: as figure 6 draws it, row by row, and what is made of it for blocks of other sizes."""

import pytest

from tests import runs
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.drafters.falcon import paper_tree

# How many children each node has, from left to right: a line for each depth of the figure, siblings together.
FIGURE_6 = """
20
11 4 4 0*17
7 8 1 1 0*7 | 1 0*3 | 1 0*3
10 0*6 | 1 0*7 | 1 | 1 | 1 | 1
10 1 0*8 | 1 | 1 | 1 | 1 | 1
4 0*9 | 1 | 1 | 1 | 1 | 1 | 1
4 0*3 | 1 | 1 | 1 | 1 | 1 | 1
3 0*3 | 1 | 1 | 1 | 1 | 1 | 1
0*3 | 0 | 0 | 0 | 0 | 0 | 0
"""


def drawn() -> list[list[int]]:
    rows = [line.replace("|", " ").split() for line in FIGURE_6.strip().split("\n")]
    parts = [[part.partition("*") for part in row] for row in rows]
    return [[int(count) for count, _, times in row for _ in range(int(times or 1))] for row in parts]


def test_the_tree_is_the_one_that_figure_6_draws() -> None:
    tree = paper_tree()
    parents, ranks, depths = (values[0].tolist() for values in (tree.parents, tree.ranks, tree.depths))

    row, found = [0], []
    for depth in range(9):
        children = [sorted((ranks[node], node) for node in range(len(tree)) if parents[node] == one) for one in row]
        assert all([rank for rank, _ in some] == list(range(len(some))) for some in children)  # the likeliest ones
        found.append([len(some) for some in children])
        row = [node for some in children for _, node in some]
        assert all(depths[node] == depth + 1 for node in row)

    assert found == drawn()
    assert [sum(counts) for counts in found] == [20, 19, 19, 15, 16, 10, 10, 9, 0]
    assert len(tree) == 1 + 118


@pytest.mark.parametrize(("block_size", "depth"), [(1, 8), (2, 8), (3, 6), (4, 8), (5, 5), (8, 8), (9, 8)])
def test_blocks_of_other_sizes_get_as_much_of_it_as_whole_blocks_reach(block_size: int, depth: int) -> None:
    tree, whole = paper_tree(block_size), paper_tree()

    assert int(tree.depths.max()) == depth
    assert tree.to_json() == whole.pruned(depth, len(whole)).to_json()


def test_a_few_of_its_nodes_are_the_likeliest_ones() -> None:
    few = paper_tree().pruned(max_depth=8, num_nodes=6)

    paths = {few.path_to(node) for node in range(len(few))}
    assert {int(few.depths[0, path[-1]]) for path in paths} == {0, 1, 2, 3}
    assert int(few.ranks.max()) <= 2


def test_the_text_with_the_tree_is_the_targets_own() -> None:
    target = make_target(seed=7).double()
    drafter = make_drafter(target, block_size=2, num_hidden_layers=2)
    drafter.generation_config = SpeculationConfig(draft_tree=paper_tree().to_json(), tune=False)

    pair = runs.both(target, drafter)

    pair.assert_equal()
    assert pair.stats.num_drafted >= 100
    assert pair.stats.acceptance_length > 1
