"""The lattice: what is kept is the smallest set with the mass asked for, and nothing that must not be drafted."""

import pytest
import torch

from tests.drafters.diffuspec.naive import smallest_set
from transformers_falcon_spec.drafters.diffuspec.lattice import Lattice, prune
from transformers_falcon_spec.errors import OptionError


def _logits(rows: int = 2, places: int = 5, vocab_size: int = 7, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, places, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tau", [0.2, 0.5, 0.8, 0.95, 0.9999, 1.0])
@pytest.mark.parametrize("max_candidates", [1, 3, 7, 20])
def test_the_fewest_tokens_with_the_mass_are_kept(tau: float, max_candidates: int) -> None:
    logits = _logits()

    lattice = prune(logits, tau, max_candidates)

    probs = logits.double().softmax(-1)
    for row, place in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
        num = int(lattice.num[row, place])
        kept, found = lattice.token_ids[row, place, :num], lattice.log_probs[row, place]
        naive = smallest_set(probs[row, place].tolist(), tau, min(max_candidates, 7))
        assert set(kept.tolist()) == (naive if tau < 1 else set(probs[row, place].topk(num).indices.tolist()))
        assert num == (len(naive) if tau < 1 else min(max_candidates, 7))
        torch.testing.assert_close(found[:num].double(), probs[row, place, kept].log(), atol=1e-5, rtol=0)
        assert found[:num].tolist() == sorted(found[:num].tolist(), reverse=True)
        assert (found[num:] == -torch.inf).all()


def test_a_place_of_one_certain_token_keeps_it_alone_and_a_flat_one_keeps_all_it_may() -> None:
    logits = torch.zeros(1, 2, 40)
    logits[0, 0, 3] = 30

    lattice = prune(logits, tau=0.8, max_candidates=15)

    assert lattice.num.tolist() == [[1, 15]]
    assert int(lattice.token_ids[0, 0, 0]) == 3
    assert lattice.confidences[0].tolist() == pytest.approx([1, 1 / 40])


def test_forbidden_tokens_are_no_candidates_and_have_no_mass() -> None:
    logits = _logits(1, 4, 6)
    logits[..., [2, 5]] = -torch.inf  # as the generator sets them

    lattice = prune(logits, tau=1, max_candidates=6)

    kept = [set(tokens[:num].tolist()) for tokens, num in zip(lattice.token_ids[0], lattice.num[0], strict=True)]
    assert kept == [{0, 1, 3, 4}] * 4
    torch.testing.assert_close(lattice.log_probs.exp().sum(-1), torch.ones(1, 4))


def _drafting(tokens: list[list[int]], end_ids: tuple[int, ...]) -> Lattice:
    """A lattice whose best candidates are `tokens`."""
    return prune(torch.nn.functional.one_hot(torch.tensor(tokens), 6) * 9.0, end_ids=end_ids)


def test_lengths_count_to_the_first_end_of_each_row() -> None:
    lattice = _drafting([[1, 2, 3, 4], [1, 5, 5, 2], [5, 1, 1, 5], [1, 1, 1, 0]], end_ids=(0, 5))

    assert lattice.num_generated.tolist() == [4, 1, 0, 3]
    assert lattice.lengths.tolist() == [4, 2, 1, 4]
    assert _drafting([[1, 5, 0, 2]], end_ids=()).lengths.tolist() == [4]


def test_ends_keep_their_log_probabilities_when_they_are_pruned() -> None:
    logits = _logits(2, 3, 8, seed=4)

    lattice = prune(logits, tau=0.3, max_candidates=2, end_ids=[6, 7])

    expected = logits.log_softmax(-1)[..., 6:].amax(-1)
    torch.testing.assert_close(lattice.end_log_probs, expected)
    assert (prune(logits).end_log_probs == -torch.inf).all()


def test_a_row_is_a_lattice_of_one_row() -> None:
    lattice = prune(_logits(), end_ids=(1,)).cpu()

    row = lattice.row(1, length=3)

    assert row.token_ids.equal(lattice.token_ids[1:, :3])
    assert row.log_probs.equal(lattice.log_probs[1:, :3])
    assert row.num.shape == row.end_log_probs.shape == (1, 3)
    assert row.end_ids == (1,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tau": 0}, "`tau` must be above 0"),
        ({"tau": 1.1}, "`tau` must be above 0"),
        ({"max_candidates": 0}, "`max_candidates` at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        prune(_logits(), **options)


def test_a_draft_of_no_place_is_refused() -> None:
    with pytest.raises(OptionError, match="the draft length is 0"):
        prune(torch.zeros(1, 0, 5))
