"""Several drafters as one: the text is the target's own whoever drafts, and each drafts what it would alone."""

import random
from typing import Any

import pytest
import torch

from tests import runs
from tests.batches import Prompts
from tests.drafters.diffuspec.stand_ins import make_diffusion
from tests.drafters.eagle.kinds import make_eagle, make_eagle_target
from tests.drafters.easyspec.kinds import make_drafter as make_layer_parallel
from tests.drafters.medusa.makers import make_medusa
from tests.drafters.texts import Text, paths
from tests.drafters.tree_drafting.twins import Twins, assert_same
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import (
    DrafterMismatchError,
    DrafterPool,
    LookaheadDrafter,
    OptionError,
    SpeculationConfig,
)
from transformers_falcon_spec.generation.drafting import DraftBudget
from transformers_falcon_spec.generation.target import Target
from transformers_falcon_spec.generation.tuning.cost_model import CostModel
from transformers_falcon_spec.generation.tuning.tuner import TRIAL

MODES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampling": runs.SAMPLING}


def make_pool(target: Any) -> DrafterPool:
    """One of each kind; they read three hidden states, one, one and none."""
    falcon = make_drafter(target, block_size=2)
    return DrafterPool(
        [make_eagle(target, "eagle-3"), falcon, make_medusa(target), LookaheadDrafter.from_target(target)]
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_text_is_the_targets_own_whoever_drafts(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_eagle_target()
    pool, draws = make_pool(target), random.Random(2)
    known = tuple(CostModel() for _ in pool.members)
    monkeypatch.setattr("transformers_falcon_spec.generation.tuning.tuner.cost_models_of", lambda *_: known)
    monkeypatch.setattr(
        "transformers_falcon_spec.generation.tuning.tuner.select_drafter", lambda *_: draws.randrange(4)
    )

    pair = runs.both(target, pool, make_prompt(5), max_new_tokens=60, **MODES[mode])

    pair.assert_equal()
    tuning = pair.stats.tuning
    assert [*tuning["steps_by_drafter"]] == [0, 1, 2, 3]
    assert len(tuning["tokens_per_second"]) == 4
    if mode == "greedy":
        rows = Prompts.of()
        runs.both(target, pool, rows.ids, attention_mask=rows.mask, max_new_tokens=40).assert_equal()


@torch.no_grad()
def test_each_drafts_what_it_would_alone() -> None:
    model = make_eagle_target()
    pool, budget = make_pool(model), DraftBudget((100,), 9)
    generator = pool.candidate_generator(Target(model, pool.feature_layers), 1000, torch.Generator())
    alone = [
        drafter.candidate_generator(Target(model, drafter.feature_layers), 1000, torch.Generator())
        for drafter in pool.members
    ]
    start = 0
    for num_new, drafter in ((9, 1), (2, 0), (1, 2), (3, 1), (1, 0)):
        commit = Text(width=5 * 16)
        commit.num_pairs = start
        generator.commit(commit.more(num_new))
        for number, columns in ((0, slice(0, 48)), (1, slice(48, 64)), (2, slice(64, 80))):
            own = Text(width=5 * 16)
            own.features, own.num_pairs = own.features[..., columns], start
            alone[number].commit(own.more(num_new))
        start += num_new

        found = generator.propose(DraftBudget((100,), 9, drafter=drafter))

        assert paths(found) == paths(alone[drafter].propose(budget))


@torch.no_grad()
def test_in_fixed_shapes_each_drafts_what_it_does_as_ever() -> None:
    model = make_eagle_target()
    whole_models = [make_layer_parallel(model, tree_depth=3), make_diffusion(model)]
    pool = DrafterPool([*[*make_pool(model).members][:3], *whole_models])
    first = Twins("eagle, falcon, medusa and whole models", num_rows=2, pair=(model, pool))
    twins = Twins("the same", num_rows=2, seed=1, pair=(model, pool), buffers=first.buffers)

    for step, drafter in enumerate((1, 3, 0, 2, 4, 1, 2, 0, 4, 3, 0)):
        plain, drafted = twins.drafts((100, 3), drafter=drafter)
        assert_same(plain, drafted, 2)
        twins.give((1 + step % 4, 3), is_kept=True)

    assert list(twins.buffers) == list(first.buffers)


def test_a_pool_with_a_drafter_that_cannot_is_not_fixed() -> None:
    model = make_eagle_target()
    pool = make_pool(model)
    generator = pool.candidate_generator(Target(model, pool.feature_layers), 1000, torch.Generator())

    reason = generator.why_not_fixed(DraftBudget((4,), 8))

    assert reason == "a `LookaheadCandidateGenerator` drafts in shapes that follow the text"


def test_without_a_tuner_the_first_one_drafts() -> None:
    target = make_eagle_target()
    pool = make_pool(target)
    for each in (pool, *pool.members):
        each.generation_config.tune = False

    alone, together = (runs.both(target, assistant, max_new_tokens=30) for assistant in (pool.members[0], pool))

    together.assert_equal()
    assert together.stats.tuning == {}
    assert together.stats.acceptance_histogram == alone.stats.acceptance_histogram


@pytest.mark.families
def test_every_drafter_has_its_trial_in_the_real_loop() -> None:
    target = make_eagle_target()
    pool = DrafterPool([make_eagle(target, "eagle-1"), make_drafter(target, block_size=2)])

    tuning = [runs.both(target, pool, make_prompt(5), max_new_tokens=60).stats.tuning for _ in range(3)][-1]

    assert len(tuning["tokens_per_second"]) == 2
    assert min(tuning["tokens_per_second"]) > 0
    assert sum(tuning["steps_by_nodes"].values()) > TRIAL


def test_options_that_would_be_ignored_are_refused() -> None:
    target = make_eagle_target()
    pool = make_pool(target)
    with pytest.raises(OptionError, match=r"drafters alone, but it was given \['DrafterPool'\]"):
        DrafterPool([pool])
    pool.members[1].generation_config.verifier = "gumbel"
    with pytest.raises(OptionError, match=r"must agree in `verifier`, but theirs are .*'gumbel'"):
        DrafterPool(list(pool.members))
    for options, message in (
        ({"num_tree_nodes": 3, "tree_depth": 2}, r"its own options have \['num_tree_nodes', 'tree_depth'\]"),
        ({"verifier": "traversal", "deterministic": False}, "`deterministic` must be True, but it is False"),
    ):
        pool.generation_config = SpeculationConfig(**options)
        with pytest.raises(OptionError, match=message):
            runs.drafted(target, pool)


def test_options_in_common_become_those_of_the_pool() -> None:
    target = make_eagle_target()
    drafters = list(make_pool(target).members)
    for drafter in drafters:
        drafter.generation_config = SpeculationConfig(deterministic=False, tune=False, step="static", compile=True)

    options = DrafterPool(drafters).generation_config

    assert (options.deterministic, options.tune, options.verifier) == (False, False, "token_matching")
    assert (options.step, options.compile) == ("static", True)


def test_options_of_the_pool_decide_how_text_is_judged() -> None:
    target = make_eagle_target()
    pool = make_pool(target)
    pool.generation_config = SpeculationConfig(verifier="gumbel")

    first = runs.drafted(target, pool, **runs.SAMPLING)

    assert first.sequences.tolist() != runs.plain(target, **runs.SAMPLING).sequences.tolist()


def test_a_pool_without_drafters_or_with_one_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionError, match="at least one drafter, and drafters alone, but it was given none"):
        DrafterPool([])
    target, other = make_eagle_target(), make_target(vocab_size=61)
    pool = DrafterPool([make_drafter(target, block_size=2), LookaheadDrafter.from_target(other)])
    with pytest.raises(DrafterMismatchError, match="expects a vocabulary of size 61"):
        runs.drafted(target, pool)
