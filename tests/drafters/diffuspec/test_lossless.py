"""The promise with a diffusion drafter: the text is the target's own, greedy and sampled, alone and in a batch, under every verifier."""

from typing import Any

import pytest
import torch

from tests import runs
from tests.batches import batch_and_drafted
from tests.doubles import InformedDrafter
from tests.drafters.diffuspec.stand_ins import make_diffusion
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import DiffusionDrafter, OptionError
from transformers_falcon_spec.core.sampling import row_seeds
from transformers_falcon_spec.drafters.diffuspec.search import NgramProxy

pytestmark = pytest.mark.families

MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampling": runs.SAMPLING}
FAMILIES = ("gemma3", "gpt2", "bloom", "lfm2", "qwen3_5")  # trees, paths and a chain
OPTIONS: dict[str, dict[str, Any]] = {
    "cps": {},
    "tree": {"search": "tree", "num_tree_nodes": 12},
    "full, no shift": {"attention": "full", "logits_shift": 0},
    "blocks": {"attention": "block_causal", "block_size": 4},
    "full": {"attention": "full"},
    "adaptive": {"draft_length": "adaptive", "min_draft_tokens": 2, "growth": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", OPTIONS)
def test_the_text_is_the_targets_own(kind: str, mode: str) -> None:
    target = make_target(seed=7).double()
    drafter = make_diffusion(target, **OPTIONS[kind])
    drafter.proxy = NgramProxy.fit([], 3, 97)
    text = runs.plain(target, **MODES[mode]).sequences

    pair = runs.both(target, InformedDrafter(drafter, text), **MODES[mode])

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.5  # drafts were kept, and drafting went on from them


@pytest.mark.parametrize("mode", MODES)
def test_a_drafter_of_the_targets_own_layers_is_often_right(mode: str) -> None:
    target = make_target(seed=7).double()
    drafter = DiffusionDrafter.from_target(target, num_hidden_layers=3, block_size=3).double().eval()
    drafter.generation_config.tune = False

    pair = runs.both(target, drafter, **MODES[mode])

    pair.assert_equal()
    assert pair.stats.acceptance_length > (1.9 if mode == "greedy" else 1.2)  # its first token is the target's own


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_targets_of_every_form_keep_their_text(family: str, mode: str) -> None:
    target = make_target(family, seed=7).double()

    runs.informed(target, make_diffusion(target, search="tree"), **MODES[mode]).assert_equal()


@pytest.mark.parametrize("kind", ["cps", "tree", "full, no shift", "adaptive"])
def test_greedy_rows_are_those_of_a_plain_batch(kind: str) -> None:
    target = make_target().double()

    pair = batch_and_drafted(target, make_diffusion(target, **OPTIONS[kind]), lengths=(12, 5, 9), max_new_tokens=24)

    pair.assert_equal()
    assert len(pair.stats.rows) == 3
    assert pair.stats.acceptance_length > 1.5


def test_sampled_rows_are_those_of_single_runs() -> None:
    target = make_target().double()
    prompt, drafter = torch.cat([make_prompt(8), make_prompt(8, seed=1)]), make_diffusion(target)
    torch.manual_seed(0)
    seeds = row_seeds(2)

    rows = runs.drafted(target, drafter, prompt, do_sample=True).sequences

    for number, seed in enumerate(seeds):
        alone = runs.plain(target, prompt[number : number + 1], do_sample=True, seed=seed).sequences
        assert rows[number].tolist() == alone[0].tolist()


@pytest.mark.parametrize("search", ["cps", "tree"])
def test_a_searched_draft_is_not_verified_as_if_it_had_been_drawn(search: str) -> None:
    target = make_target().double()
    drafter = make_diffusion(target, search=search, verifier="recursive_rejection")

    with pytest.raises(OptionError, match="needs a draft that was drawn"):
        runs.drafted(target, drafter, do_sample=True)


def test_an_end_of_text_among_the_drafts_ends_the_text() -> None:
    target = make_target(seed=7).double()
    ends = [int(runs.plain(target).sequences[0, -9])]
    target.generation_config.eos_token_id = ends
    text = runs.plain(target).sequences
    for kind in ("cps", "tree"):
        drafter = make_diffusion(target, **OPTIONS[kind])
        drafter.config.eos_token_id = ends

        pair = runs.both(target, InformedDrafter(drafter, text, hit_rate=1.0))

        pair.assert_equal()
        assert pair.plain.sequences.shape[1] < 36


def test_coupled_text_does_not_depend_on_the_drafter() -> None:
    target, texts = make_target().double(), []

    for options in ({}, {"search": "tree"}, {"attention": "full"}):
        drafter = make_diffusion(target, verifier="gumbel", **options)
        texts.append(runs.drafted(target, drafter, do_sample=True).sequences.tolist())

    assert texts[1:] == texts[:1] * 2


def test_a_cached_prefix_of_the_users_keeps_the_text() -> None:
    target, cached = make_target().double(), make_prompt()[:, :7]
    drafter = make_diffusion(target)
    with torch.no_grad():
        cache = target(cached, use_cache=True).past_key_values
    assert runs.drafted(target, drafter, past_key_values=cache).sequences.equal(runs.plain(target).sequences)
