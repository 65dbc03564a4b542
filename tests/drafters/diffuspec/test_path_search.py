"""Searches of a lattice: against enumerating all paths, and ends of the text."""

import math

import pytest
import torch

from tests.drafters.diffuspec.naive import NaiveLattice, WittenBell, best_of_each, mixed
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.drafters.diffuspec.search import (
    Lattice,
    NgramProxy,
    PathScores,
    prune,
    search_path,
    tree_over,
)

VOCAB_SIZE, END = 5, 4
HISTORY = (1, 3, 0)


def _logits(positions: int, seed: int, end: float = 0.0) -> torch.Tensor:
    logits = 1.5 * torch.randn(positions, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    logits[..., END] += end
    return logits


def _text(seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(seed)).tolist()


def _twin(lattice: Lattice, order: int | None, weight: float) -> NaiveLattice:
    kept = [ids[:num].tolist() for ids, num in zip(lattice.token_ids, lattice.num.tolist(), strict=True)]
    log_probs = [
        dict(zip(tokens, row.tolist(), strict=False)) for tokens, row in zip(kept, lattice.log_probs, strict=True)
    ]
    proxy = None if order is None else WittenBell([_text()], order, VOCAB_SIZE)
    share = 1.0 if order is None else weight
    ends = [share * score for score in lattice.end_log_probs.tolist()]
    return NaiveLattice(kept, mixed(log_probs, proxy, HISTORY, weight), ends, set(lattice.end_ids))


def _proxy(order: int | None) -> NgramProxy | None:
    return None if order is None else NgramProxy.fit([_text()], order, VOCAB_SIZE)


CASES = [(order, weight) for order in (1, 2, 3) for weight in (0.0, 0.5, 0.8)] + [(None, 0.5), (3, 1.0)]


@pytest.mark.parametrize(("order", "weight"), CASES)
@pytest.mark.parametrize("end", [-2.0, 0.5, 2.0])  # ends of the text are rare, usual, everywhere
def test_a_beam_that_keeps_everything_finds_the_best_of_all_paths(
    order: int | None, weight: float, end: float
) -> None:
    for seed in range(2):
        lattice = prune(_logits(4, seed, end), mass=1, end_ids=[END])

        path = search_path(PathScores(lattice, _proxy(order), HISTORY, weight), beam_width=10**4)

        assert tuple(path) == _twin(lattice, order, weight).best()


@pytest.mark.parametrize(("order", "weight"), CASES)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_narrow_beam_keeps_the_best_paths_of_each_position(order: int | None, weight: float, width: int) -> None:
    for seed in range(2):
        lattice = prune(_logits(7, seed, 0.5), mass=0.9, max_candidates=4, end_ids=[END])

        path = search_path(PathScores(lattice, _proxy(order), HISTORY, weight), beam_width=width)

        assert tuple(path) == _twin(lattice, order, weight).beam(width)


def test_a_beam_of_one_takes_the_best_next_token_each_time() -> None:
    lattice = prune(_logits(8, seed=2), mass=1)
    scores, proxy = PathScores(lattice, _proxy(3), HISTORY), WittenBell([_text()], 3, VOCAB_SIZE)
    log_probs, path = _logits(8, seed=2).log_softmax(-1).tolist(), list(HISTORY)
    for row in log_probs:
        path.append(max(range(VOCAB_SIZE), key=lambda token: row[token] + math.log(proxy.prob(path, token))))

    assert search_path(scores, beam_width=1) == path[len(HISTORY) :]


def test_without_a_proxy_the_path_is_that_of_the_best_tokens() -> None:
    for seed in range(10):
        lattice = prune(_logits(6, seed, end=-1), end_ids=[END])

        assert search_path(PathScores(lattice)) == best_of_each(lattice)


def _lattice(*positions: dict[int, float]) -> Lattice:
    """Candidates and their probabilities at each position; what is left goes to token 0."""
    probs = torch.full((len(positions), VOCAB_SIZE), 1e-9)
    for offset, candidates in enumerate(positions):
        for token, prob in candidates.items():
            probs[offset, token] = prob
        probs[offset, 0] += (1 - probs[offset].sum()).clamp(min=0)
    return prune(probs.log(), mass=0.999999, end_ids=[END])


def test_a_text_that_ends_at_once_is_a_draft_of_one_token() -> None:
    lattice = _lattice({END: 0.9}, {1: 0.9}, {END: 0.9})

    assert best_of_each(lattice) == [END]
    assert search_path(PathScores(lattice)) == [END]
    assert tree_over(PathScores(lattice), 3, 9).token_ids == [3, END, 0]


def test_a_draft_of_ends_alone_is_a_draft_of_one_end() -> None:
    lattice = _lattice(*[{END: 1.0}] * 4)

    path = search_path(PathScores(lattice, _proxy(3), HISTORY))

    assert path == best_of_each(lattice) == [END]


def test_a_path_reaches_no_further_than_the_first_best_end() -> None:
    lattice = _lattice({1: 0.9}, {2: 0.9}, {END: 0.6, 3: 0.4}, {1: 1.0})

    assert search_path(PathScores(lattice)) == [1, 2, END]
    only_threes = NgramProxy.fit([[1, 2, 3] * 50], 3, VOCAB_SIZE)
    assert search_path(PathScores(lattice, only_threes, [3])) == [1, 2, 3]


def test_ending_early_costs_what_the_drafter_says_against_it_at_all_later_positions() -> None:
    # Scores are sums of negative numbers: alone, log .3 of an end at once beats log .7 + 3 log .5 of going on.
    flat = {1: 0.45, 2: 0.45, END: 1e-4}
    lattice = _lattice({1: 0.7, END: 0.3}, flat, flat, flat)
    assert math.log(0.3) > math.log(0.7) + 3 * math.log(0.45)

    assert len(search_path(PathScores(lattice))) == 4


@pytest.mark.parametrize(("order", "weight"), CASES)
@pytest.mark.parametrize("num_nodes", [1, 2, 9, 30])
def test_a_tree_holds_the_best_nodes_of_all(order: int | None, weight: float, num_nodes: int) -> None:
    for seed in range(3):
        lattice = prune(_logits(4, seed, 0.3), mass=0.95, max_candidates=4, end_ids=[END])

        tree = tree_over(PathScores(lattice, _proxy(order), HISTORY, weight), HISTORY[-1], num_nodes)

        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
            assert 0 <= parent < len(paths)
            paths.append((*paths[parent], token))
        twin = _twin(lattice, order, weight)
        naive = twin.best_nodes(num_nodes)
        assert tree.parents[0] == -1
        assert tree.token_ids[0] == HISTORY[-1]
        assert len(set(paths)) == len(paths)
        totals, best = ([twin.total(path, len(path)) for path in nodes] for nodes in (paths, naive))
        assert totals == pytest.approx(best, abs=1e-5)  # best first; which of equals does not matter


def test_a_tree_by_marginals_is_the_best_first_tree() -> None:
    lattice = prune(_logits(5, seed=3), mass=1)

    tree = tree_over(PathScores(lattice), root=0, num_nodes=25)

    best = DraftTree.best_first(lattice.log_probs.exp(), 25)
    assert tree.parents == best.parents[0].tolist()
    offsets = best.depths[0, 1:] - 1
    assert tree.token_ids[1:] == lattice.token_ids[offsets, best.ranks[0, 1:]].tolist()


def test_a_tree_has_no_more_nodes_than_there_are_paths() -> None:
    lattice = _lattice({1: 0.5, END: 0.2}, {2: 1.0})

    tree = tree_over(PathScores(lattice), root=3, num_nodes=99)

    assert sorted(zip(tree.token_ids, tree.parents, strict=True)) == [
        (0, 0),
        (1, 0),
        (2, 1),
        (2, 3),
        (3, -1),
        (4, 0),  # nothing follows an end
    ]


def test_logits_that_are_no_numbers_give_a_draft_for_the_target_to_refuse() -> None:
    lattice = prune(torch.full((3, VOCAB_SIZE), torch.nan), end_ids=[END])

    assert len(search_path(PathScores(lattice, _proxy(3), HISTORY))) >= 1
    assert tree_over(PathScores(lattice, _proxy(3), HISTORY), 0, 5).token_ids[0] == 0
