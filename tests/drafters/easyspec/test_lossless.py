"""The promise with an EasySpec drafter: the text is the target's own, greedy and sampled, alone and in a batch, under every verifier."""

import pytest
import torch

from tests import runs
from tests.batches import assert_sampled_rows_are_single_runs, batch_and_drafted
from tests.distribution import assert_texts_have_the_distribution_of
from tests.doubles import InformedDrafter
from tests.drafters.easyspec.kinds import KINDS, make_drafter
from tests.drafters.easyspec.twin import IN_ORDER, with_backend
from tests.pairs import in_turn
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import DraftTree, LayerParallelDrafter, SpeculationConfig

pytestmark = pytest.mark.families

MODES = {"greedy": {}, "sampling": runs.SAMPLING}
FAMILIES = ("gemma3", "gpt2", "bloom", "lfm2", "qwen3_5")  # trees, paths and a chain
DRAWING = ("recursive_rejection", "traversal")
BACKENDS = (IN_ORDER, "fused")
TREE = DraftTree.from_lists([-1, 0, 0, 1, 1, 2, 3, 4, 0])


@pytest.mark.parametrize(("kind", "mode"), in_turn(KINDS, MODES))
def test_the_text_is_the_targets_own(kind: str, mode: str) -> None:
    target = make_target(seed=7).double()
    drafter = make_drafter(target, kind, BACKENDS[mode == "greedy"])
    text = runs.plain(target, **MODES[mode]).sequences

    pair = runs.both(target, InformedDrafter(drafter, text), **MODES[mode])

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1.5  # paths were kept, and drafting went on from them


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_target_drafting_for_itself_is_often_right(backend: str, mode: str) -> None:
    target = make_target(seed=7, num_hidden_layers=5).double()
    drafter = with_backend(LayerParallelDrafter.wrap(target, target, group_size=2), backend)
    drafter.generation_config.tune = False

    pair = runs.both(target, drafter, **MODES[mode])

    pair.assert_equal()
    assert pair.stats.acceptance_length > (
        1.9 if mode == "greedy" else 1.3
    )  # its exact pass drafts the next token right


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_targets_of_every_form_keep_their_text(family: str, mode: str) -> None:
    target = make_target(family, seed=7).double()

    runs.informed(target, make_drafter(target), **MODES[mode]).assert_equal()


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_rows_are_those_of_a_plain_batch(backend: str, is_dynamic: bool) -> None:
    target = make_target().double()
    drafter = make_drafter(target, "llama", backend, dynamic_tree=is_dynamic, draft_tree=TREE.to_json())

    pair = batch_and_drafted(target, drafter, lengths=(12, 5), max_new_tokens=30)

    pair.assert_equal()
    assert len(pair.stats.rows) == 2
    assert pair.stats.acceptance_length > 1.5


def test_sampled_rows_are_those_of_single_runs() -> None:
    target = make_target().double()
    prompts = torch.cat([make_prompt(8), make_prompt(8, seed=1)])

    assert_sampled_rows_are_single_runs(target, make_drafter(target), prompts)


@pytest.mark.parametrize("verifier", [*DRAWING, "gumbel", "token_matching"])
def test_every_rule_writes_and_a_batch_is_no_exception(verifier: str) -> None:
    target = make_target().double()
    drafter = make_drafter(target, draft_tree=TREE.to_json())
    drafter.generation_config = SpeculationConfig(verifier=verifier)

    out = runs.drafted(target, drafter, make_prompt(6).repeat(2, 1), do_sample=True, temperature=0.8)

    assert out.sequences.shape == (2, 30)
    assert out.speculation.num_drafted > 0


def test_gumbel_coupling_writes_one_text_for_a_seed_whatever_the_groups() -> None:
    target, texts = make_target().double(), []

    for options in ({}, {"layer_groups": [[number] for number in range(7)]}, {"kind": "qwen3", "backend": IN_ORDER}):
        drafter = make_drafter(target, **options)
        drafter.generation_config = SpeculationConfig(verifier="gumbel")
        texts.append(runs.drafted(target, drafter, do_sample=True).sequences.tolist())

    assert texts[1:] == texts[:1] * 2


def test_a_cached_prefix_of_the_users_keeps_the_text() -> None:
    target, cached = make_target().double(), make_prompt()[:, :7]
    drafter = make_drafter(target)
    with torch.no_grad():
        cache = target(cached, use_cache=True).past_key_values
    assert runs.drafted(target, drafter, past_key_values=cache).sequences.equal(runs.plain(target).sequences)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [*DRAWING, "gumbel", "token_matching"])
def test_texts_of_a_small_model_have_its_distribution(verifier: str) -> None:
    target = make_target(vocab_size=5)
    drafter = make_drafter(target, draft_tree=TREE.to_json(), changes={"vocab_size": 5}, tree_top_k=3)
    drafter.generation_config = SpeculationConfig(verifier=verifier)

    assert_texts_have_the_distribution_of(target, drafter)
