"""The promise with a DFlash drafter in this package's loop, and that it keeps what the stock loop keeps, or more with trees."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests import runs
from tests.batches import assert_sampled_rows_are_single_runs, batch_and_drafted
from tests.drafters.dflash.makers import from_stock, make_dflash_drafter
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.pairs import in_turn
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import DFlashDrafter, DraftTree, SpeculationConfig
from transformers_falcon_spec.generation.timed import watched_stats

pytestmark = pytest.mark.families

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "granite", "cohere", "mistral", "bloom", "lfm2", "qwen3_5")
MODES = {"greedy": {}, "sampling": runs.SAMPLING}
CAPTURES = (False, True)
NUM_PROMPTS = 4
BLOCK = 5


def _few_tokens(prompts: torch.Tensor) -> torch.Tensor:
    """The prompts in a vocabulary of 6 tokens, where untrained drafters are often right; 0 would be padding."""
    return prompts % 3 + 3


@pytest.mark.parametrize(("family", "mode"), [*in_turn(FAMILIES, MODES), ("llama", "sampling")])
def test_the_text_is_the_targets_own(family: str, mode: str) -> None:
    target = make_target(family, seed=7).double()

    pair = runs.informed(target, make_dflash_drafter(target), max_new_tokens=40, **MODES[mode])

    pair.assert_equal()
    assert pair.stats.acceptance_length > 2


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("mode", ["greedy", "temperature"])
def test_its_own_drafts_are_kept_and_the_text_is_the_targets_own(mode: str, capture: bool) -> None:
    target = make_target(num_hidden_layers=4, vocab_size=6).double()
    options = {"greedy": {}, "temperature": {"do_sample": True, "temperature": 0.7}}[mode]

    drafter = make_dflash_drafter(target, {"capture": capture})
    pair = runs.both(target, drafter, _few_tokens(make_prompt()), max_new_tokens=60, **options)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.2
    assert pair.stats.notes == []


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("is_dynamic", [True, False], ids=["grown", "static tree"])
def test_greedy_rows_are_those_of_a_plain_batch(is_dynamic: bool, capture: bool) -> None:
    target = make_target(num_hidden_layers=4).double()
    drafter = make_dflash_drafter(target, {"dynamic_tree": is_dynamic, "capture": capture})

    pair = batch_and_drafted(target, drafter, max_new_tokens=30)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.5


@pytest.mark.parametrize("capture", CAPTURES)
def test_sampled_rows_are_those_of_single_runs(capture: bool) -> None:
    target, prompts = (
        make_target(vocab_size=6).double(),
        _few_tokens(torch.cat([make_prompt(8, seed) for seed in range(3)])),
    )

    assert_sampled_rows_are_single_runs(
        target, make_dflash_drafter(target, {"capture": capture}), prompts, temperature=0.7
    )


@pytest.mark.parametrize("verifier", ["recursive_rejection", "traversal", "gumbel"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_every_verifier_takes_its_drafts(verifier: str, num_rows: int) -> None:
    target = make_target().double()
    prompts = torch.cat([make_prompt(8, seed) for seed in range(num_rows)])

    out = runs.drafted(
        target, make_dflash_drafter(target, {"verifier": verifier}), prompts, do_sample=True, temperature=0.8
    )

    assert out.sequences.shape == (num_rows, 32)
    assert out.speculation.num_drafted > 0


def _stock_and_own(target: PreTrainedModel) -> tuple[Any, DFlashDrafter]:
    stock = peaked_dflash(target, target_layer_ids=[0, 1], block_size=BLOCK)
    return stock, from_stock(stock, target)


def _counts(target: PreTrainedModel, drafter: Any, config: SpeculationConfig | None, seed: int) -> tuple[int, int]:
    """Accepted tokens and steps of a text; without options of this package that of the stock loop."""
    prompt, greedy = _few_tokens(make_prompt(9, seed)), {"do_sample": False}
    if config is None:
        arguments = {"assistant_model": drafter, "speculation_type": "dflash"}
        stats = watched_stats(target, prompt, 30, greedy, 0, arguments)
    else:
        drafter.generation_config = config
        stats = runs.drafted(target, drafter, prompt, max_new_tokens=30).speculation
    return stats.num_accepted, stats.num_steps


def test_a_chain_keeps_what_the_stock_loop_keeps_and_a_tree_no_less() -> None:
    target = make_target(num_hidden_layers=4, vocab_size=6).double()
    stock, own = _stock_and_own(target)
    chain = SpeculationConfig(draft_tree=DraftTree.chain(BLOCK - 1).to_json(), tune=False)
    trees = [SpeculationConfig(num_tree_nodes=num, tune=False) for num in (8, 32)]

    counts = [_counts(target, stock, None, seed) for seed in range(NUM_PROMPTS)]
    chained = [_counts(target, own, chain, seed) for seed in range(NUM_PROMPTS)]
    kept = [sum(_counts(target, own, tree, seed)[1] for seed in range(NUM_PROMPTS)) for tree in trees]

    assert chained == counts
    assert sum(accepted for accepted, _ in counts) > NUM_PROMPTS
    assert kept[1] <= kept[0] < sum(steps for _, steps in chained)
