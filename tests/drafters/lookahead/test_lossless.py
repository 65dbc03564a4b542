"""The promise with a Lookahead drafter: the text is the target's own, whatever is in the pool and the window."""

from typing import Any

import pytest
import torch

from tests import runs
from tests.doubles import RandomDrafter
from tests.generation.test_candidates import ride_the_stock_loop
from tests.reference import tree_logits
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import LookaheadDrafter, SpeculationConfig
from transformers_falcon_spec.core.sampling import GeneratorDraws, row_seeds

SMALL = {"window_size": 4, "ngram_len": 4, "num_guesses": 4}
FAMILIES = ("llama", "qwen3", "gemma3", "gpt2", "opt", "llama4", "bloom", "lfm2")  # trees, paths and a chain
MODES = {"greedy": {}, "sampling": runs.SAMPLING, "cool": {"do_sample": True, "temperature": 0.3}}


def repetitive_prompt(num_rows: int = 1) -> torch.Tensor:
    """Each row says the same four tokens again and again."""
    return torch.cat([make_prompt(4, seed) for seed in range(num_rows)]).repeat(1, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_lookahead_writes_the_targets_text(family: str, mode: str) -> None:
    target = make_target(family, seed=7).double()

    pair = runs.both(target, LookaheadDrafter.from_target(target, **SMALL), repetitive_prompt(), **MODES[mode])

    pair.assert_equal()
    assert pair.stats.num_drafted > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom"])
def test_greedy_rows_are_those_of_a_plain_batch(family: str) -> None:
    target, mask = make_target(family).double(), torch.ones(3, 16, dtype=torch.long)
    mask[1, :5] = 0

    drafter = LookaheadDrafter.from_target(target, **SMALL)
    pair = runs.both(target, drafter, repetitive_prompt(3), attention_mask=mask, max_new_tokens=40)

    pair.assert_equal()
    assert len(pair.stats.rows) == 3
    assert pair.stats.num_accepted > 0


def test_sampled_rows_are_those_of_single_runs() -> None:
    target = make_target().double()
    drafter, options = LookaheadDrafter.from_target(target, **SMALL), {"do_sample": True, "temperature": 0.3}
    torch.manual_seed(0)
    seeds = row_seeds(3)

    rows = runs.drafted(target, drafter, repetitive_prompt(3), **options).sequences

    for row, seed in enumerate(seeds):
        alone = runs.drafted(target, None, repetitive_prompt(3)[row : row + 1], seed=seed, **options).sequences
        assert rows[row].tolist() == alone[0].tolist()


class Parrot(torch.nn.Module):
    """What makes a target say the same few tokens again and again: its scores follow from the newest token alone."""


def parrot(num_tokens: int = 5) -> Any:
    """A Llama whose text repeats itself soon: a token is followed by the next of `num_tokens`, and by nothing else."""
    target = make_target().double()
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    target = parrot()  # attends to nothing, so the text loops as soon as a token comes again

    pair = runs.both(target, LookaheadDrafter.from_target(target, **SMALL), max_new_tokens=100)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 2


def test_guests_are_never_committed_and_never_offered() -> None:
    target = make_target().double()
    drafter = LookaheadDrafter.from_target(target, window_size=4, ngram_len=4, num_guesses=1, pool_size=1)

    pair = runs.both(target, drafter)

    pair.assert_equal()
    stats = pair.stats
    assert stats.num_drafted > 5 * stats.num_steps  # guests were read
    assert stats.offered_by_depth == stats.kept_by_depth == []


def test_window_and_pool_help_beyond_what_the_text_says() -> None:
    target = parrot()
    prompt = make_prompt(3)
    wide, narrow = (
        LookaheadDrafter.from_target(target, window_size=size, ngram_len=3, num_guesses=4) for size in (8, 1)
    )

    lengths = [
        runs.drafted(target, drafter, prompt, max_new_tokens=16).speculation.acceptance_length
        for drafter in (wide, narrow)
    ]

    assert lengths[0] > lengths[1]


def test_transformers_own_loop_takes_the_generator() -> None:
    target = make_target().double()
    gold = runs.plain(target, repetitive_prompt()).sequences

    out, _ = ride_the_stock_loop(target, LookaheadDrafter.from_target(target, **SMALL), repetitive_prompt())

    assert out.sequences.equal(gold)


@pytest.mark.parametrize("options", [SpeculationConfig(strict=True), SpeculationConfig(verifier="gumbel")])
def test_strict_mode_and_coupled_draws_work(options: SpeculationConfig) -> None:
    target = parrot().float()
    drafter = LookaheadDrafter.from_target(target, **SMALL)
    drafter.generation_config = options

    out = runs.drafted(target, drafter, max_new_tokens=40, do_sample=options.verifier == "gumbel", temperature=0.2)

    assert out.speculation.num_drafted > 0
    assert out.sequences.shape[1] == 52
    if options.strict:
        assert out.sequences.equal(runs.plain(target, max_new_tokens=40).sequences)


def test_a_generator_that_wants_them_gets_the_choices_after_every_node() -> None:
    target, drafter = make_target().double(), RandomDrafter(num_nodes=6, num_guests=2)
    drafter.wants_node_choices = True
    prompts = torch.cat([make_prompt(), make_prompt(seed=1)])

    gold = runs.drafted(target, drafter, prompts, max_new_tokens=12).sequences

    generator = drafter.generators[0]
    assert generator.commits[0].node_choices is None  # the prompt holds no draft
    for draft, before, after in zip(generator.drafts, generator.commits[:-1], generator.commits[1:], strict=True):
        for row in range(2):
            prefix = gold[row : row + 1, : before.lengths[row] - 1]
            parents, token_ids = draft.parents[row].tolist(), draft.token_ids[row].tolist()
            is_node = [node == 0 or parent >= 0 for node, parent in enumerate(parents)]
            expected = tree_logits(target, prefix, token_ids, parents).argmax(-1)
            assert after.node_choices[row][is_node].equal(expected[is_node])


def test_others_get_no_choices() -> None:
    drafter = RandomDrafter()

    runs.drafted(make_target(), drafter)

    assert all(commit.node_choices is None for commit in drafter.generators[0].commits)
