"""Draws: the global stream as plain decoding uses it, a private one that leaves it alone, every branch."""

import pytest
import torch

from tests import reference
from transformers_falcon_spec.core.sampling import GeneratorDraws, choose, multinomial_noise, private_generator


def _scores(rows: int = 1, vocab_size: int = 11) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rows", [1, 4])
def test_sampling_draws_what_plain_generate_draws(rows: int) -> None:
    scores = _scores(rows)

    torch.manual_seed(7)
    ours = [choose(scores, True, GeneratorDraws()).tolist() for _ in range(50)]
    state = torch.get_rng_state()
    torch.manual_seed(7)
    plain = [torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1).tolist() for _ in range(50)]

    assert ours == plain
    assert state.equal(torch.get_rng_state())


def test_a_given_generator_is_used_instead_of_the_global_stream() -> None:
    scores, before = _scores(), torch.get_rng_state()

    ours = [int(choose(scores, True, GeneratorDraws(torch.Generator().manual_seed(5)))) for _ in range(3)]

    assert len(set(ours)) == 1
    assert torch.get_rng_state().equal(before)


def test_the_noise_behind_a_draw_gives_the_drawn_token() -> None:
    probs = _scores(vocab_size=50).softmax(-1)

    drawn = [int(torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed))) for seed in range(100)]
    rebuilt = [
        int((probs / multinomial_noise(probs, torch.Generator().manual_seed(seed))).argmax()) for seed in range(100)
    ]

    assert rebuilt == drawn


def test_greedy_takes_the_best_and_draws_nothing() -> None:
    scores, draws = _scores(rows=3), reference.ScriptedDraws()

    tokens = choose(scores, False, draws)

    assert tokens.equal(scores.argmax(-1))
    assert draws.taken == []


def test_choose_takes_every_branch_with_the_probability_of_its_softmax() -> None:
    scores = torch.tensor([[0.5, -1.0, 2.0, float("-inf")]], dtype=torch.float64)

    probs = reference.distribution(lambda draws: int(choose(scores, True, draws)))

    assert probs == pytest.approx(dict(enumerate(scores.softmax(-1)[0].tolist()[:3])))


def test_private_generator_leaves_the_global_stream_untouched() -> None:
    before = torch.get_rng_state()

    torch.rand(5, generator=private_generator())

    assert torch.get_rng_state().equal(before)


def test_private_generator_follows_from_the_state_of_the_global_stream() -> None:
    def draw(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return torch.rand(4, generator=private_generator()).tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_private_generator_moves_on_with_the_global_stream() -> None:
    first = torch.rand(4, generator=private_generator())
    torch.rand(1)

    second = torch.rand(4, generator=private_generator())

    assert not first.equal(second)
