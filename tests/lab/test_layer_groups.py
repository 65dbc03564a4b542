"""The best divisions of layers, against trying all of them."""

from itertools import combinations, pairwise

import pytest
import torch

from lab.layer_groups import best_divisions, candidate_groups, with_group


def test_candidates_leave_the_first_and_the_last_layer_alone() -> None:
    assert candidate_groups(5, 4) == [(1, 2), (2, 2), (1, 3)]
    assert with_group(5, 2, 2) == [[0], [1], [2, 3], [4]]
    assert with_group(3) == [[0], [1], [2]]


def every_division(num_layers: int, losses: dict[tuple[int, int], float]) -> dict[int, float]:
    """The least loss of every number of groups, by trying all divisions."""
    least: dict[int, float] = {}
    for num_cuts in range(num_layers - 2):
        for cuts in combinations(range(2, num_layers - 1), num_cuts):
            bounds = [1, *cuts, num_layers - 1]
            sizes = [end - start for start, end in pairwise(bounds)]
            pieces = list(zip(bounds, sizes, strict=False))
            if any(size > 1 and (start, size) not in losses for start, size in pieces):
                continue
            loss = sum(losses[piece] for piece in pieces if piece[1] > 1)
            least[num_cuts + 3] = min(least.get(num_cuts + 3, loss), loss)
    return least


@pytest.mark.parametrize("num_layers", [4, 7, 10])
@pytest.mark.parametrize("max_size", [2, 3, 5])
def test_divisions_are_the_best_of_all(num_layers: int, max_size: int) -> None:
    draws = torch.Generator().manual_seed(num_layers + max_size)
    candidates = candidate_groups(num_layers, max_size)
    losses = dict(zip(candidates, (torch.rand(len(candidates), generator=draws) - 0.1).tolist(), strict=True))

    found = best_divisions(num_layers, losses)

    expected = every_division(num_layers, losses)
    assert [len(groups) for groups in found] == sorted(expected, reverse=True)
    for groups in found:
        assert [layer for group in groups for layer in group] == list(range(num_layers))
        assert len(groups[0]) == len(groups[-1]) == 1
        loss = sum(losses[group[0], len(group)] for group in groups if len(group) > 1)
        assert loss == pytest.approx(expected[len(groups)])
