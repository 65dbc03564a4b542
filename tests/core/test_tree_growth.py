"""Growing trees: the tensors against a naive twin that remembers paths, and what must hold of every grown tree."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from tests.growing import grown_paths
from tests.reference import path_to
from transformers_falcon_spec.core.tree import TreeGrowth

VOCAB = 5


class RandomModel:
    """A distribution over `VOCAB` tokens after each path, drawn when it is asked for first; coarse ones have ties."""

    def __init__(self, seed: int, is_coarse: bool) -> None:
        self.rng, self.is_coarse = random.Random(seed), is_coarse
        self.known: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, path: tuple[int, ...], offset: int = 0) -> list[float]:
        path = (*path[: len(path) - offset], -offset) if offset else path  # blind to what stands in the block
        if path not in self.known:
            draws = range(1, 3) if self.is_coarse else range(1, 10**6)
            weights = [self.rng.choice(draws) for _ in range(VOCAB)]
            self.known[path] = [weight / sum(weights) for weight in weights]
        return self.known[path]


def grow(
    models: Sequence[RandomModel], max_depths: Sequence[int], num_passes: int, top_k: int, num_nodes: int
) -> tuple[list[list[tuple[int, ...]]], TreeGrowth]:
    """Paths of tokens of each row's tree, grown with tensors; and what they were grown in."""
    growth = TreeGrowth(torch.full((len(models), 1), 99), torch.tensor(max_depths))
    frontier = torch.zeros(len(models), 1, dtype=torch.long)
    for number in range(num_passes):
        if number:
            frontier = growth.best_newest(top_k)
        probs = torch.tensor(
            [
                [
                    model(tuple(int(growth.token_ids[row, above]) for above in path_to(parents, node)[1:]))
                    for node in frontier[row].tolist()
                ]
                for row, (model, parents) in enumerate(zip(models, growth.parents.tolist(), strict=True))
            ],
            dtype=torch.double,
        )
        order = probs.sort(dim=-1, descending=True, stable=True)
        growth.expand(frontier, order.indices[..., :top_k], order.values[..., :top_k].log().float())
    token_ids, parents = growth.best(num_nodes)
    found = []
    for ids, above_of in zip(token_ids.tolist(), parents.tolist(), strict=True):
        nodes = [node for node, parent in enumerate(above_of) if node == 0 or parent >= 0]
        assert nodes == list(range(len(nodes)))  # fillers come last
        found.append([tuple(ids[above] for above in path_to(above_of, node)[1:]) for node in nodes])
    return found, growth


@pytest.mark.parametrize("seed", range(30))
def test_the_tree_is_that_of_the_naive_twin(seed: int) -> None:
    rng = random.Random(seed)
    num_passes, top_k, num_nodes = rng.randint(1, 4), rng.randint(1, VOCAB), rng.randint(1, 20)
    models = [RandomModel(10 * seed + row, is_coarse=False) for row in range(rng.randint(1, 3))]
    max_depths = [rng.randint(0, num_passes) for _ in models]

    found, _ = grow(models, max_depths, num_passes, top_k, num_nodes)

    for row, model in enumerate(models):
        assert found[row] == grown_paths(model, min(num_passes, max_depths[row]), top_k, num_nodes)


@pytest.mark.parametrize("is_coarse", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_ancestors_are_in_siblings_differ_and_nothing_likelier_is_out(seed: int, is_coarse: bool) -> None:
    model = RandomModel(seed, is_coarse)
    (paths,), growth = grow([model], [4], 4, top_k=3, num_nodes=9)

    assert len(set(paths)) == len(paths) == 9
    assert all(path[:-1] in paths for path in paths if path)
    probs = [math.prod(model(path[:depth])[token] for depth, token in enumerate(path)) for path in paths]
    likeliest = growth.log_node_probs[0].exp().sort(descending=True).values[:9]
    assert sorted(probs, reverse=True) == pytest.approx(likeliest.tolist(), rel=1e-4)


@pytest.mark.parametrize("log_prob", [0.0, 1e-6])  # rounding may leave a little more than nothing
def test_a_certain_child_never_pushes_its_parent_out(log_prob: float) -> None:
    growth = TreeGrowth(torch.tensor([[1]]), torch.tensor([3]))
    certain = torch.full((1, 1, 1), log_prob)

    for depth in range(3):
        growth.expand(torch.tensor([[depth]]), torch.tensor([[[7 + depth]]]), certain)
    token_ids, parents = growth.best(3)

    assert token_ids.tolist() == [[1, 7, 8]]
    assert parents.tolist() == [[-1, 0, 1]]


@pytest.mark.parametrize("is_blind", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_grow_as_those_of_the_naive_twin(seed: int, is_blind: bool) -> None:
    rng = random.Random(seed)
    size, top_k, num_nodes = rng.randint(2, 3), rng.randint(1, VOCAB), rng.randint(2, 25)
    num_blocks, depth = max(top_k // size, 2), rng.randint(1, 3 * size)
    model = RandomModel(seed, is_coarse=False)
    growth = TreeGrowth(torch.tensor([[99]]), torch.tensor([depth]))
    ends = torch.tensor([[0]])

    def what_follows(path: tuple[int, ...], offset: int) -> list[float]:
        return model(path, offset if is_blind else 0)

    def children(offset: int, nodes: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        above = [path_to(growth.parents[0].tolist(), node)[1:] for node in nodes[0].tolist()]
        paths = [tuple(growth.token_ids[0, path].tolist()) for path in above]
        best = torch.tensor([[what_follows(path, offset) for path in paths]], dtype=torch.double).topk(top_k, dim=-1)
        return best.indices, best.values.log().float()

    for _ in range(-(-depth // size)):
        ends, blocks = growth.expand_blocks(ends, size, children, num_blocks)
        above = [growth.path_up(ends, size + 1)[0, number, 0].item() for number in range(ends.shape[1])]
    token_ids, kept_parents = growth.best(num_nodes)

    parents = kept_parents[0].tolist()
    nodes = [node for node, parent in enumerate(parents) if node == 0 or parent >= 0]
    found = [tuple(token_ids[0, path_to(parents, node)[1:]].tolist()) for node in nodes]
    assert found == grown_paths(what_follows, depth, top_k, num_nodes, size)
    assert len(set(zip(above, blocks[0].tolist(), strict=True))) == len(
        set(above)
    )  # one block for each that it follows


@pytest.mark.parametrize(("price", "stops"), [(0.0, False), (0.2, True)])  # of each node
def test_where_no_newest_node_pays_none_below_does(price: float, stops: bool) -> None:
    prices, weights = torch.arange(200) * price, torch.ones(9)

    def grown(model: RandomModel, stops_early: bool) -> tuple[bool, int, list[int]]:
        growth, offsets = TreeGrowth(torch.tensor([[99]]), torch.tensor([6])), []

        def pays() -> bool:
            return growth.newest_are_kept(growth.best_tree_size(prices, weights)[0])

        def children(offset: int, nodes: torch.Tensor, _blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            offsets.append(offset)
            paths = [tuple(growth.token_ids[0, path[1:]].tolist()) for path in growth.path_up(nodes, offset + 1)[0]]
            best = torch.tensor([[model(path) for path in paths]], dtype=torch.double).topk(3, dim=-1)
            return best.indices, best.values.log().float()

        found = growth.expand_blocks(torch.tensor([[0]]), 6, children, 2, pays if stops_early else None)
        size, _gain = growth.best_tree_size(prices, weights)
        return found is None, len(offsets), growth.best(size)[0][0].tolist()

    ended = []
    for seed in range(10):
        model = RandomModel(seed, is_coarse=False)
        (is_short, num_levels, tokens), (_, num_all, all_tokens) = grown(model, True), grown(model, False)
        assert tokens == all_tokens
        assert (num_all, num_levels < 6) == (6, is_short)
        ended.append(is_short)
    assert any(ended) == stops


def test_children_without_a_number_for_a_probability_enter_no_tree() -> None:
    growth, nan = TreeGrowth(torch.tensor([[1]]), torch.tensor([2])), torch.nan

    growth.expand(torch.tensor([[0]]), torch.tensor([[[7, 8, 9]]]), torch.tensor([[[nan, -1.0, nan]]]))
    token_ids, parents = growth.best(3)

    assert token_ids[0, :2].tolist() == [1, 8]
    assert parents.tolist() == [[-1, 0, -1]]


def test_a_row_without_room_has_fillers_that_belong_to_nobody() -> None:
    growth = TreeGrowth(torch.tensor([[1], [2]]), torch.tensor([1, 0]))

    growth.expand(torch.zeros(2, 1, dtype=torch.long), torch.tensor([[[3]], [[4]]]), torch.zeros(2, 1, 1))
    _, parents = growth.best(5)

    assert parents.tolist() == [[-1, 0], [-1, -1]]
