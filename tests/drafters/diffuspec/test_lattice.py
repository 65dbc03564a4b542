"""The lattice: what is kept is the smallest set with the mass asked for, and nothing that must not be drafted."""

import pytest
import torch

from tests.drafters.diffuspec.naive import smallest_set
from transformers_falcon_spec.drafters.diffuspec.search import Lattice, prune


def _logits(positions: int = 5, vocab_size: int = 7, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(positions, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tau", [0.2, 0.5, 0.8, 0.95, 0.9999, 1.0])
@pytest.mark.parametrize("max_candidates", [1, 3, 7, 20])
def test_the_fewest_tokens_with_the_mass_are_kept(tau: float, max_candidates: int) -> None:
    logits = _logits(10)

    lattice = prune(logits, tau, max_candidates)

    probs = logits.double().softmax(-1)
    for offset in range(10):
        num = int(lattice.num[offset])
        kept, found = lattice.token_ids[offset, :num], lattice.log_probs[offset]
        naive = smallest_set(probs[offset].tolist(), tau, min(max_candidates, 7))
        assert set(kept.tolist()) == (naive if tau < 1 else set(probs[offset].topk(num).indices.tolist()))
        assert num == (len(naive) if tau < 1 else min(max_candidates, 7))
        torch.testing.assert_close(found[:num].double(), probs[offset, kept].log(), atol=1e-5, rtol=0)
        assert found[:num].tolist() == sorted(found[:num].tolist(), reverse=True)
        assert (found[num:] == -torch.inf).all()


def test_a_position_of_one_certain_token_keeps_it_alone_and_a_flat_one_keeps_all_it_may() -> None:
    logits = torch.zeros(2, 40)
    logits[0, 3] = 30

    lattice = prune(logits, mass=0.8, max_candidates=15)

    assert lattice.num.tolist() == [1, 15]
    assert int(lattice.token_ids[0, 0]) == 3
    assert lattice.log_probs[:, 0].exp().tolist() == pytest.approx([1, 1 / 40])


def test_forbidden_tokens_are_no_candidates_and_have_no_mass() -> None:
    logits = _logits(4, 6)
    logits[..., [2, 5]] = -torch.inf  # as the generator sets them

    lattice = prune(logits, mass=1, max_candidates=6)

    kept = [set(tokens[:num].tolist()) for tokens, num in zip(lattice.token_ids, lattice.num, strict=True)]
    assert kept == [{0, 1, 3, 4}] * 4
    torch.testing.assert_close(lattice.log_probs.exp().sum(-1), torch.ones(4))


def _drafting(tokens: list[int], end_ids: tuple[int, ...]) -> Lattice:
    """A lattice whose best candidates are `tokens`."""
    return prune(torch.nn.functional.one_hot(torch.tensor(tokens), 6) * 9.0, end_ids=end_ids)


def test_lengths_count_to_the_first_end() -> None:
    rows = [[1, 2, 3, 4], [1, 5, 5, 2], [5, 1, 1, 5], [1, 1, 1, 0]]

    found = [_drafting(tokens, end_ids=(0, 5)) for tokens in rows]

    assert [lattice.num_generated for lattice in found] == [4, 1, 0, 3]
    assert [lattice.length for lattice in found] == [4, 2, 1, 4]
    assert _drafting([1, 5, 0, 2], end_ids=()).length == 4


def test_ends_keep_their_log_probabilities_when_they_are_pruned() -> None:
    logits = _logits(3, 8, seed=4)

    lattice = prune(logits, mass=0.3, max_candidates=2, end_ids=[6, 7])

    expected = logits.log_softmax(-1)[..., 6:].amax(-1)
    torch.testing.assert_close(lattice.end_log_probs, expected)
    assert (prune(logits).end_log_probs == -torch.inf).all()


def test_the_first_positions_are_a_lattice() -> None:
    lattice = prune(_logits(), end_ids=(1,))

    first = lattice[:3]

    assert first.token_ids.equal(lattice.token_ids[:3])
    assert first.log_probs.equal(lattice.log_probs[:3])
    assert first.num.shape == first.end_log_probs.shape == (3,)
    assert first.end_ids == (1,)
