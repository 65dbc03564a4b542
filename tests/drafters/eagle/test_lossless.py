"""The promise with an Eagle drafter: the text is the target's own, greedy and sampled, alone and in a batch, under every verifier."""

from typing import Any

import pytest
import torch

from tests import runs
from tests.batches import assert_sampled_rows_are_single_runs, batch_and_drafted
from tests.distribution import assert_texts_have_the_distribution_of
from tests.drafters.eagle.kinds import KINDS, make_eagle
from tests.pairs import in_turn
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import DraftTree, SpeculationConfig

pytestmark = pytest.mark.families

MODES = {"greedy": {}, "sampling": runs.SAMPLING}
FAMILIES = ("qwen3", "gemma3", "gpt2", "bloom", "lfm2", "qwen3_5")  # trees, paths and a chain
DRAWING = ("recursive_rejection", "traversal")
TREE = DraftTree.from_lists([-1, 0, 0, 1, 1, 2, 3, 4, 0])


@pytest.mark.parametrize(("kind", "mode"), in_turn(KINDS, MODES))
def test_the_text_is_the_targets_own(kind: str, mode: str) -> None:
    target = make_target(seed=7).double()
    drafter = make_eagle(target, kind)

    alone = runs.both(target, drafter, max_new_tokens=12, **MODES[mode])
    informed = runs.informed(target, drafter, max_new_tokens=40, **MODES[mode])

    alone.assert_equal(is_kept=False)
    informed.assert_equal()
    assert alone.stats.num_drafted > 0
    assert informed.stats.acceptance_length > 2  # paths were kept, and drafting went on from them


@pytest.mark.parametrize(("family", "mode"), in_turn(FAMILIES, MODES))
def test_targets_of_every_form_keep_their_text(family: str, mode: str) -> None:
    target = make_target(family, seed=7).double()

    for kind in ("eagle-1", "eagle-3"):
        runs.informed(target, make_eagle(target, kind), **MODES[mode]).assert_equal()


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_greedy_rows_are_those_of_a_plain_batch(kind: str, is_dynamic: bool) -> None:
    target = make_target().double()
    drafter = make_eagle(target, kind, dynamic_tree=is_dynamic, draft_tree=TREE.to_json())

    pair = batch_and_drafted(target, drafter, lengths=(12, 5), max_new_tokens=30)

    pair.assert_equal()
    assert len(pair.stats.rows) == 2
    assert pair.stats.acceptance_length > 1.5


@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_sampled_rows_are_those_of_single_runs(kind: str) -> None:
    target = make_target().double()
    prompts = torch.cat([make_prompt(8), make_prompt(8, seed=1)])

    assert_sampled_rows_are_single_runs(target, make_eagle(target, kind), prompts)


@pytest.mark.parametrize("verifier", [*DRAWING, "gumbel", "token_matching"])
@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_every_rule_writes_and_a_batch_is_no_exception(kind: str, verifier: str) -> None:
    target = make_target().double()
    drafter = make_eagle(target, kind, draft_tree=TREE.to_json())
    drafter.generation_config = SpeculationConfig(verifier=verifier)

    out = runs.drafted(target, drafter, make_prompt(6).repeat(2, 1), do_sample=True, temperature=0.8)

    assert out.sequences.shape == (2, 30)
    assert out.speculation.num_drafted > 0
    runs.informed(target, drafter, do_sample=False).assert_equal()


def test_gumbel_coupling_writes_one_text_for_a_seed_whatever_the_drafter() -> None:
    target, texts = make_target().double(), []

    for options in ({}, {"dynamic_tree": False}, {"tree_top_k": 2, "tree_depth": 6}, {"seed": 9}):
        drafter = make_eagle(target, "eagle-1", **options)
        drafter.generation_config = SpeculationConfig(verifier="gumbel")
        texts.append(runs.drafted(target, drafter, do_sample=True).sequences.tolist())

    assert texts[1:] == texts[:1] * 3


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [*DRAWING, "gumbel", "token_matching"])
@pytest.mark.parametrize("kind", ["eagle-1", "eagle-1 of fewer tokens", "eagle-3"])
def test_texts_of_a_small_model_have_its_distribution(kind: str, verifier: str) -> None:
    target = make_target(vocab_size=5)
    small: dict[str, Any] = {"tree_top_k": 3} if kind == "eagle-1" else {"tree_top_k": 3, "draft_vocab_size": 4}
    drafter = make_eagle(target, kind, draft_tree=TREE.to_json(), **small)
    drafter.generation_config = SpeculationConfig(verifier=verifier)

    assert_texts_have_the_distribution_of(target, drafter)
