"""Trees: masks, depths and paths against walking up, builders against brute force, refusals by their text."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import best_trees, reference
from tests.core.strategies import few, parent_lists
from transformers_falcon_spec import DraftTree
from transformers_falcon_spec.errors import DraftTreeError

BUSHY = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 10, 11]


@few
@given(parent_lists())
def test_ancestor_mask_is_what_walking_up_finds(parents: list[int]) -> None:
    tree = DraftTree.from_lists(parents)

    assert tree.ancestor_mask[0].tolist() == reference.ancestor_mask(parents)


@few
@given(parent_lists())
def test_depth_is_the_number_of_steps_to_the_root(parents: list[int]) -> None:
    tree = DraftTree.from_lists(parents)

    assert tree.depths[0].tolist() == [len(reference.path_to(parents, node)) - 1 for node in range(len(parents))]


@few
@given(parent_lists())
def test_paths_run_from_the_root_to_every_node(parents: list[int]) -> None:
    tree = DraftTree.from_lists(parents)

    assert [tree.path_to(node) for node in range(len(tree))] == [
        reference.path_to(parents, node) for node in range(len(parents))
    ]


@few
@given(parent_lists(max_nodes=70))
def test_pointer_doubling_reaches_the_root_of_deep_trees(parents: list[int]) -> None:
    chain = list(range(-1, 69))

    for shape in (parents, chain):
        assert DraftTree.from_lists(shape).ancestor_mask[0].tolist() == reference.ancestor_mask(shape)


def test_rows_are_masked_apart_and_fillers_see_themselves_only() -> None:
    parents = torch.tensor([[-1, 0, 1, 1], [-1, 0, -1, -1]])

    tree = DraftTree(parents, torch.zeros_like(parents))

    assert tree.ancestor_mask[0].tolist() == reference.ancestor_mask([-1, 0, 1, 1])
    assert tree.ancestor_mask[1].tolist() == reference.ancestor_mask([-1, 0, -1, -1])
    assert tree.depths.tolist() == [[0, 1, 2, 2], [0, 1, 0, 0]]


@few
@given(parent_lists())
def test_siblings_are_ranked_in_order_when_no_ranks_are_given(parents: list[int]) -> None:
    ranks = DraftTree.from_lists(parents).ranks[0].tolist()

    for parent in set(parents):
        children = [node for node in range(len(parents)) if parents[node] == parent]
        assert [ranks[child] for child in children] == (list(range(len(children))) if parent >= 0 else [-1])


@few
@given(parent_lists())
def test_json_round_trip_keeps_the_tree(parents: list[int]) -> None:
    tree = DraftTree.from_lists(parents)

    again = DraftTree.from_json(json.loads(json.dumps(tree.to_json())))

    assert again.parents.equal(tree.parents)
    assert again.ranks.equal(tree.ranks)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 5])
def test_chain_has_one_path_of_first_choices(num_draft_tokens: int) -> None:
    chain = DraftTree.chain(num_draft_tokens)

    assert chain.path_to(len(chain) - 1) == tuple(range(num_draft_tokens + 1))
    assert chain.ranks[0].tolist() == [-1] + [0] * num_draft_tokens


@pytest.mark.parametrize(
    ("parents", "ranks", "message"),
    [
        ([], None, r"`parents` must start with -1, the root, but it starts with \[\]\."),
        ([0, 0], None, r"`parents` must start with -1, the root, but it starts with \[0\]\."),
        (
            [-1, 0, 3, 0],
            None,
            r"Node 2 must come after its parent, but its parent is 3\. Order nodes from the root down\.",
        ),
        ([-1, 0, 2], None, r"Node 2 must come after its parent, but its parent is 2\."),
        ([-1, -1], None, r"Node 1 must come after its parent, but its parent is -1\."),
        ([-1, 0, 0], [-1, 0], r"`ranks` needs one entry for each node: 3, but it has 2\."),
        ([-1, 0], [0, 0], r"`ranks` must be -1 at the root and 0 or more elsewhere, but they are \[0, 0\]\."),
        ([-1, 0], [-1, -2], r"`ranks` must be -1 at the root and 0 or more elsewhere, but they are \[-1, -2\]\."),
        ([-1, 0, 0], [-1, 1, 1], r"Siblings must differ in rank, but node 0 has two children of rank 1\."),
    ],
)
def test_malformed_trees_are_refused(parents: list[int], ranks: list[int] | None, message: str) -> None:
    with pytest.raises(DraftTreeError, match=message):
        DraftTree.from_lists(parents, ranks)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [-1, 0],
        {"parents": [-1]},
        {"parents": [-1], "ranks": None},
        {"parents": [-1, 0.5], "ranks": [-1, 0]},
        {"parents": "-1", "ranks": "-1"},
        {"parents": [-1], "ranks": [-1], "depth": 1},
    ],
    ids=str,
)
def test_stored_trees_of_another_form_are_refused(value: object) -> None:
    message = "A stored tree must be an object with `parents` and `ranks`, lists of whole numbers, but it is "
    with pytest.raises(DraftTreeError, match=message + re.escape(str(value))):
        DraftTree.from_json(value)


def test_a_stored_tree_of_too_many_nodes_is_refused_by_their_count_alone() -> None:
    """Its mask would have a place for each pair of nodes: ten billion for a hundred thousand."""

    class Counted(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("its nodes were looked at")

    value = {"parents": Counted(range(-1, 99_999)), "ranks": Counted([0] * 100_000)}

    with pytest.raises(DraftTreeError, match="must have at most 512 nodes, but it has 100000"):
        DraftTree.from_json(value)
    assert len(DraftTree.from_json(DraftTree.chain(511).to_json())) == 512


def _descending(values: list[float]) -> list[float]:
    return sorted(values, reverse=True)


acceptances = st.integers(1, 3).flatmap(
    lambda num_ranks: st.lists(
        st.lists(st.floats(0.01, 0.99), min_size=num_ranks, max_size=num_ranks).map(_descending),
        min_size=1,
        max_size=3,
    )
)


@few
@given(acceptances, st.integers(1, 20))
def test_best_first_takes_the_likeliest_nodes_in_order(acceptance: list[list[float]], num_nodes: int) -> None:
    tree = DraftTree.best_first(torch.tensor(acceptance, dtype=torch.float64), num_nodes)

    node_probs = [1.0]
    for node in range(1, len(tree)):
        parent, rank, depth = int(tree.parents[0, node]), int(tree.ranks[0, node]), int(tree.depths[0, node])
        node_probs.append(node_probs[parent] * acceptance[depth - 1][rank])
    assert node_probs == pytest.approx(reference.best_first(acceptance, num_nodes))


unordered = st.integers(1, 3).flatmap(
    lambda num_ranks: st.lists(
        st.lists(st.floats(0, 1), min_size=num_ranks, max_size=num_ranks), min_size=1, max_size=3
    )
)


@few
@given(unordered, st.integers(1, 5))
def test_the_dynamic_programme_finds_the_best_of_all_trees(acceptance: list[list[float]], num_nodes: int) -> None:
    trees = best_trees.all_trees(len(acceptance), len(acceptance[0]), num_nodes)

    best = max(best_trees.length(acceptance, tree) for tree in trees)

    assert best_trees.best_length(acceptance, num_nodes) == pytest.approx(best)


@few
@given(acceptances, st.integers(1, 30))
def test_no_tree_of_its_size_is_expected_to_be_kept_deeper_than_the_best_first_one(
    acceptance: list[list[float]], num_nodes: int
) -> None:
    rates = torch.tensor(acceptance, dtype=torch.float64)

    tree = DraftTree.best_first(rates, num_nodes)

    assert tree.expected_length(rates) == pytest.approx(best_trees.best_length(acceptance, num_nodes))


def test_where_acceptance_rises_with_rank_best_first_is_not_the_best() -> None:
    acceptance = [[0.1, 0.9]]

    length = DraftTree.best_first(torch.tensor(acceptance), 2).expected_length(torch.tensor(acceptance))

    assert (length, best_trees.best_length(acceptance, 2)) == pytest.approx((1.1, 1.9))


@few
@given(acceptances, st.integers(1, 20), st.integers(1, 20))
def test_the_first_nodes_of_a_best_first_tree_are_that_of_fewer(
    acceptance: list[list[float]], num_nodes: int, num_fewer: int
) -> None:
    rates = torch.tensor(acceptance, dtype=torch.float64)

    pruned = DraftTree.best_first(rates, num_nodes).pruned(max_depth=9, num_nodes=min(num_fewer, num_nodes))

    assert pruned.to_json() == DraftTree.best_first(rates, min(num_fewer, num_nodes)).to_json()


@few
@given(parent_lists(max_nodes=12), st.lists(st.floats(0, 1), min_size=12, max_size=12))
def test_the_expected_length_is_the_sum_of_the_probabilities_of_all_paths(
    parents: list[int], rates: list[float]
) -> None:
    tree = DraftTree.from_lists(parents)
    acceptance = [[rates[(depth + rank) % 12] for rank in range(12)] for depth in range(12)]

    length = tree.expected_length(torch.tensor(acceptance, dtype=torch.float64))

    ranks = tree.ranks[0].tolist()
    paths = [tuple(ranks[above] for above in reference.path_to(parents, node)[1:]) for node in range(len(parents))]
    assert length == pytest.approx(best_trees.length(acceptance, frozenset(paths)))


RATES = torch.tensor([[0.5, 0.25], [0.5, 0.25]])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DraftTree.best_first(RATES, 0), r"`num_nodes` must be at least 1, for the root, but it is 0\."),
        (lambda: DraftTree.best_first(RATES, -3), r"`num_nodes` must be at least 1, for the root, but it is -3\."),
        (
            lambda: DraftTree.best_first(RATES[:0], 3),
            r"`acceptance` must hold probabilities from 0 to 1 of at least one",
        ),
        (lambda: DraftTree.best_first(2.5 * RATES, 3), r"from 0 to 1 .* but it is \[\[1\.25, 0\.625\]"),
        (lambda: DraftTree.best_first(-RATES, 3), r"`acceptance` must hold probabilities from 0 to 1"),
        (lambda: DraftTree.best_first(RATES / 0 * 0, 3), r"`acceptance` must hold probabilities from 0 to 1"),
    ],
)
def test_trees_of_bad_budgets_and_probabilities_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(DraftTreeError, match=message):
        build()


@few
@given(parent_lists(), st.integers(0, 6), st.integers(1, 15))
def test_pruned_keeps_the_first_nodes_within_the_limits(parents: list[int], max_depth: int, num_nodes: int) -> None:
    tree = DraftTree.from_lists(parents)

    pruned = tree.pruned(max_depth, num_nodes)

    depths = tree.depths[0].tolist()
    kept = [node for node in range(len(tree)) if depths[node] <= max_depth][:num_nodes]
    assert pruned.parents[0].tolist() == [-1 if parents[node] < 0 else kept.index(parents[node]) for node in kept]
    assert pruned.ranks[0].tolist() == [int(tree.ranks[0, node]) for node in kept]


@few
@given(parent_lists(), st.integers(0, 6), st.integers(1, 15))
def test_pruned_to_a_chain_follows_first_children(parents: list[int], max_depth: int, num_nodes: int) -> None:
    chain = DraftTree.from_lists(parents).pruned(max_depth, num_nodes, is_chain=True)

    path = [0]
    while path[-1] in parents:
        path.append(parents.index(path[-1]))
    assert chain.path_to(len(chain) - 1) == tuple(range(min(len(path), max_depth + 1, num_nodes)))


def test_pruned_within_wide_limits_is_the_same_tree() -> None:
    tree = DraftTree.from_lists(BUSHY)

    pruned = tree.pruned(max_depth=99, num_nodes=99)

    assert pruned.to_json() == tree.to_json()
