"""The promise with a Lookahead drafter: the text is the target's own, whatever is in the pool and the window."""

from typing import Any

import pytest
import torch

from tests import runs
from tests.batches import assert_sampled_rows_are_single_runs
from tests.pairs import in_turn
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import LookaheadDrafter, SpeculationConfig
from transformers_falcon_spec.drafters.lookahead import JacobiWindow, NgramPool

pytestmark = pytest.mark.families

SMALL = {"window_size": 4, "ngram_len": 4, "num_guesses": 4}
FAMILIES = (
    "llama",
    "qwen3",
    "gemma3",
    "gpt2",
    "opt",
    "llama4",
    "bloom",
    "lfm2",
    "qwen3_5",
)  # trees, paths and a chain
MODES = {"greedy": {}, "sampling": runs.SAMPLING, "cool": {"do_sample": True, "temperature": 0.3}}


def repetitive_prompt(num_rows: int = 1) -> torch.Tensor:
    """Each row says the same four tokens again and again."""
    return torch.cat([make_prompt(4, seed) for seed in range(num_rows)]).repeat(1, 4)


@pytest.mark.parametrize(("family", "mode"), in_turn(FAMILIES, MODES))
def test_lookahead_writes_the_targets_text(family: str, mode: str) -> None:
    target = make_target(family, seed=7).double()

    drafter = LookaheadDrafter.from_target(target, **SMALL)

    # random texts repeat themselves too seldom for a hit in each of them
    pair = runs.informed(target, drafter, repetitive_prompt(), max_new_tokens=48, **MODES[mode])

    pair.assert_equal()


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom"])
def test_greedy_rows_are_those_of_a_plain_batch(family: str) -> None:
    target, mask = make_target(family), torch.ones(3, 16, dtype=torch.long)
    if family != "bloom":  # whose attention gives NaN at padding in double precision
        target = target.double()
    mask[1, :5] = 0

    drafter = LookaheadDrafter.from_target(target, **SMALL)
    pair = runs.both(target, drafter, repetitive_prompt(3), attention_mask=mask, max_new_tokens=40)

    pair.assert_equal()
    assert len(pair.stats.rows) == 3
    assert pair.stats.num_accepted > 0


def test_sampled_rows_are_those_of_single_runs() -> None:
    target = make_target().double()
    drafter = LookaheadDrafter.from_target(target, **SMALL)

    assert_sampled_rows_are_single_runs(target, drafter, repetitive_prompt(3), temperature=0.3)


def parrot() -> Any:
    """A Llama whose next token follows from the newest one alone, so that its text soon goes round in a circle."""
    target = make_target().double()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    target = parrot()

    pair = runs.both(target, LookaheadDrafter.from_target(target, **SMALL), max_new_tokens=100)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 2


def test_lookahead_nodes_are_never_committed_and_never_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramPool, "continuations", lambda *_: [])  # lookahead nodes are all that is left
    target = parrot()  # the window is soon right about it
    drafter = LookaheadDrafter.from_target(target, **SMALL)
    drafter.generation_config.tune = False

    pair = runs.both(target, drafter, max_new_tokens=40)

    pair.assert_equal(is_kept=False)
    assert pair.stats.num_drafted > 5 * 20
    assert pair.stats.num_steps == 39
    assert pair.stats.offered_by_depth == pair.stats.kept_by_depth == []


def test_the_window_brings_hits_before_the_text_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    target, lengths = parrot(), []
    advance = JacobiWindow.advance

    for has_ngrams in (True, False):
        monkeypatch.setattr(JacobiWindow, "advance", lambda *args: advance(*args) if has_ngrams else [])  # noqa: B023
        drafter = LookaheadDrafter.from_target(target, **SMALL)
        drafter.generation_config.tune = False
        lengths.append(runs.drafted(target, drafter, max_new_tokens=30).speculation.acceptance_length)

    assert lengths[0] > lengths[1]


def test_coupled_draws_work() -> None:
    target = parrot().float()
    drafter = LookaheadDrafter.from_target(target, **SMALL)
    drafter.generation_config = SpeculationConfig(verifier="gumbel")

    out = runs.drafted(target, drafter, max_new_tokens=40, do_sample=True, temperature=0.2)

    assert out.speculation.num_drafted > 0
    assert out.sequences.shape[1] == 52
