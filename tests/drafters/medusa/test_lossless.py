"""The promise with a Medusa drafter: the text is the target's own, one row or several, whatever the heads say."""

from typing import Any

import pytest
import torch

from tests import runs
from tests.batches import assert_sampled_rows_are_single_runs
from tests.distribution import assert_texts_have_the_distribution_of
from tests.doubles import InformedDrafter
from tests.drafters.medusa.makers import make_medusa
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig

pytestmark = pytest.mark.families

FAMILIES = (
    "llama",
    "qwen3",
    "gemma3",
    "gpt2",
    "cohere",
    "llama4",
    "bloom",
    "lfm2",
    "qwen3_5",
)  # trees, paths and a chain
MODES = {"greedy": {}, "sampling": runs.SAMPLING}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_medusa_writes_the_targets_text(family: str, mode: str) -> None:
    target = make_target(family, seed=7).double()
    drafter = make_medusa(target, has_lm_heads=FAMILIES.index(family) % 2 == 0)

    runs.informed(target, drafter, **MODES[mode]).assert_equal()


@pytest.mark.parametrize("mode", MODES)
def test_medusa_that_is_often_right_writes_the_targets_text(mode: str) -> None:
    target = make_target().double()
    gold = runs.plain(target, max_new_tokens=40, **MODES[mode]).sequences

    pair = runs.both(target, InformedDrafter(make_medusa(target), gold), max_new_tokens=40, **MODES[mode])

    pair.assert_equal()
    assert pair.stats.acceptance_length > 2


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom"])
def test_greedy_rows_are_those_of_a_plain_batch(family: str) -> None:
    target, mask = make_target(family), torch.ones(3, 16, dtype=torch.long)
    if family != "bloom":  # whose attention gives NaN at padding in double precision
        target = target.double()
    mask[1, :5] = 0
    prompts = torch.cat([make_prompt(16, seed) for seed in range(3)])
    gold = runs.plain(target, prompts, attention_mask=mask).sequences

    drafter = InformedDrafter(make_medusa(target), gold, mask=mask)
    pair = runs.both(target, drafter, prompts, attention_mask=mask)

    pair.assert_equal()
    assert pair.stats.num_accepted > 0


def test_sampled_rows_are_those_of_single_runs() -> None:
    target, prompts = make_target().double(), torch.cat([make_prompt(8, seed) for seed in range(3)])

    assert_sampled_rows_are_single_runs(target, make_medusa(target), prompts, temperature=0.7)


def with_verifier(target: Any, verifier: str, seed: int = 1) -> Any:
    drafter = make_medusa(target, seed)
    drafter.generation_config = SpeculationConfig(verifier=verifier)
    return drafter


@pytest.mark.parametrize("verifier", ["recursive_rejection", "traversal", "gumbel"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_every_verifier_takes_its_drafts(verifier: str, num_rows: int) -> None:
    target = make_target().double()
    prompts = torch.cat([make_prompt(8, seed) for seed in range(num_rows)])

    out = runs.drafted(
        target, with_verifier(target, verifier), prompts, do_sample=True, temperature=0.8, output_scores=True
    )

    assert out.sequences.shape == (num_rows, 32)
    assert out.speculation.num_drafted > 0
    for number, scores in enumerate(out.scores):  # each token was possible at its position
        assert (scores.gather(1, out.sequences[:, 8 + number, None]) > -torch.inf).all()


def test_coupled_text_does_not_depend_on_the_drafter() -> None:
    target = make_target().double()

    texts = [
        runs.drafted(target, with_verifier(target, "gumbel", seed), do_sample=True, temperature=0.8).sequences
        for seed in (1, 2)
    ]

    assert texts[0].equal(texts[1])


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["recursive_rejection", "traversal"])
def test_drawn_drafts_keep_the_targets_distribution(verifier: str) -> None:
    target = make_target(vocab_size=5)

    assert_texts_have_the_distribution_of(target, with_verifier(target, verifier))
