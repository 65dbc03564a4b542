"""Draws: the global stream as plain decoding uses it, a private one that leaves it alone, every branch."""

from typing import Any

import pytest
import torch

from tests import reference
from tests.tape import taped
from transformers_falcon_spec.core import sampling
from transformers_falcon_spec.core.sampling import (
    CoupledDraws,
    ForeseeableDraws,
    GeneratorDraws,
    choose,
    choose_by_noise,
    multinomial_noise,
    private_generator,
)

CPU = torch.device("cpu")


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


def _draws(kind: str) -> ForeseeableDraws:
    if kind == "coupled":
        return CoupledDraws(3)
    torch.manual_seed(3)
    return GeneratorDraws(torch.Generator().manual_seed(5) if kind == "generator" else None)


@pytest.mark.parametrize("kind", ["global stream", "generator", "coupled"])
@pytest.mark.parametrize("num_kept", [1, 3])
def test_noise_that_was_filled_ahead_draws_what_is_drawn_one_by_one(kind: str, num_kept: int) -> None:
    scores = [_scores(vocab_size=50) * scale for scale in range(1, 7)]
    draws = _draws(kind)
    draws.categorical(scores[0].softmax(-1))  # they need not be fresh
    before = draws.get_state(CPU)

    noise = torch.zeros(4, 50)
    states: list[Any] = draws.fill_ahead(noise[:1])
    states += draws.fill_ahead(noise[1:], start=states[-1])
    unmoved = draws.get_state(CPU)
    ahead = [int(choose_by_noise(each, row[None])[0]) for each, row in zip(scores, noise, strict=False)]
    draws.set_state(states[num_kept - 1], CPU)
    after = [int(choose(each, True, draws)) for each in scores[num_kept:]]

    plain = _draws(kind)
    plain.categorical(scores[0].softmax(-1))
    drawn = [int(choose(each, True, plain)) for each in scores]
    assert torch.equal(torch.as_tensor(before), torch.as_tensor(unmoved))
    assert ahead == drawn[:4]
    assert after == drawn[num_kept:]


@pytest.mark.parametrize("kind", ["global stream", "generator"])
@pytest.mark.parametrize("num_elsewhere", [0, 1])  # draws that somebody else makes from the stream meanwhile
def test_noise_that_was_looked_at_is_not_made_again_and_changes_no_draw(
    kind: str, num_elsewhere: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    probs = [(_scores(vocab_size=50) * scale).softmax(-1) for scale in range(1, 9)]
    made: list[int] = []
    monkeypatch.setattr(sampling, "multinomial_noise", lambda *args: made.append(1) or multinomial_noise(*args))

    def drawn(looks: bool) -> list[int]:
        draws, found = _draws(kind), []
        assert isinstance(draws, GeneratorDraws)
        for step in (0, 3, 6):  # of three tokens, after a look at four
            ahead = draws.noise_ahead(50, CPU)
            seen = [ahead(depth) for depth in range(1, 5)] if looks else []
            for at, each in enumerate(probs[step : step + 2]):
                found.append(int(draws.categorical(each)))
                assert not seen or found[-1] == int((each / seen[at]).argmax())
            tokens, states = draws.categorical_by_depth(probs[step].expand(2, -1), torch.tensor([0, 1]))
            draws.set_state(states[0], CPU)
            found.append(int(tokens[0]))
            torch.rand(num_elsewhere, generator=draws.generator)
        return found

    plain, num_plain = drawn(looks=False), len(made)
    assert drawn(looks=True) == plain
    assert len(made) - num_plain == (3 * 4 if num_elsewhere else 4 + 3 + 3)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_probabilities_that_are_none_are_refused_as_without_a_look_ahead(wrong: float) -> None:
    draws, probs = GeneratorDraws(torch.Generator().manual_seed(0)), torch.rand(1, 50)
    draws.noise_ahead(50, CPU)(2)
    probs[0, 3] = wrong
    with pytest.raises(RuntimeError, match="inf"):
        draws.categorical(probs)


@pytest.mark.parametrize("probs", [torch.rand(1, 60), torch.rand(1, 50).double(), torch.rand(2, 50)])
def test_noise_of_another_kind_is_not_used(probs: torch.Tensor) -> None:
    draws = GeneratorDraws(torch.Generator().manual_seed(0))
    draws.noise_ahead(50, CPU)(2)

    found = draws.categorical(probs)

    assert found.tolist() == GeneratorDraws(torch.Generator().manual_seed(0)).categorical(probs).tolist()


def test_choosing_by_noise_is_work_that_a_capture_repeats() -> None:
    scores, noise = _scores(3), torch.ones(3, 11).exponential_()
    chosen, is_valid = torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 1, dtype=torch.bool)

    def work() -> None:
        for buffer, found in zip((chosen, is_valid), choose_by_noise(scores, noise), strict=True):
            buffer.copy_(found)

    replay = taped(work)
    scores.neg_()[1].fill_(float("-inf"))
    replay()

    assert chosen[::2].equal((scores.softmax(-1) / noise).argmax(-1, keepdim=True)[::2])
    assert is_valid.tolist() == [[True], [False], [True]]
    assert choose_by_noise(scores.to("meta"), noise.to("meta"))[0].shape == (3, 1)


@pytest.mark.parametrize("best", [float("inf"), float("nan"), float("-inf")])
def test_a_token_may_be_drawn_where_plain_sampling_can_draw_it(best: float) -> None:
    scores = torch.full((1, 5), float("-inf")).index_fill(1, torch.tensor([2]), best)

    assert not choose_by_noise(scores, torch.ones(1, 5))[1]
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        choose(scores, True, GeneratorDraws())


def test_without_noise_the_best_token_is_chosen_and_always_valid() -> None:
    scores = _scores(rows=3)
    scores[1] = float("-inf")

    tokens, is_valid = choose_by_noise(scores, None)

    assert tokens.equal(scores.argmax(-1, keepdim=True))
    assert is_valid.all()


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
