"""The branch of repeated text: texts stay the target's own, its tokens are accepted, and fixed shapes draft the same."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import runs, tape
from tests.batches import Prompts, assert_sampled_rows_are_single_runs
from tests.drafters.eagle.kinds import make_eagle
from tests.drafters.medusa.makers import make_medusa
from tests.drafters.texts import merged, paths
from tests.drafters.tree_drafting.test_fixed import on_meta
from tests.drafters.tree_drafting.twins import Twins, as_kept, assert_same, make_pair
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.drafters.tree_drafting import proposing
from transformers_falcon_spec.errors import GenerationError, OptionError
from transformers_falcon_spec.generation.drafting import DraftBudget, Kept, Prices

LOOPING = make_prompt(3).repeat(1, 5)  # three tokens that come again and again
NUM_NEW = 48
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.3},
    "penalty": runs.SAMPLING,
}
KINDS: dict[str, dict[str, Any]] = {
    "falcon, static": {"dynamic_tree": False},
    "falcon, grown": {"dynamic_tree": True, "num_tree_nodes": 6},
    "eagle, grown": {"num_tree_nodes": 6, "tree_depth": 2},
}


def make(target: Any, kind: str, **options: Any) -> Any:
    """A drafter with a branch of text; untrained, so that next to nothing else of its drafts is accepted."""
    drafter = make_drafter(target, block_size=2) if kind.startswith("falcon") else make_eagle(target, "eagle-1")
    drafter.generation_config = SpeculationConfig(
        **{"prompt_lookup_num_tokens": 6, "tune": False, **KINDS[kind], **options}
    )
    return drafter


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def target() -> Any:
    """A target in double precision, whose greedy text soon goes round."""
    return make_target(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2).double()


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets_own(kind: str, mode: str, capture: bool, target: Any) -> None:
    options = {"max_new_tokens": NUM_NEW, **MODES[mode]}

    pair = runs.both(target, make(target, kind, capture=capture), LOOPING, **options)

    pair.assert_equal(is_kept=mode == "greedy")
    if mode == "greedy":
        assert len(pair.stats.kept_by_depth) == 6  # branches were accepted whole
        num_asked = pair.stats.num_passes / (2 if kind.startswith("eagle") else 1)
        assert num_asked < pair.stats.num_steps  # in some of them the drafter was not


@pytest.mark.parametrize("options", [{}, {"capture": True}, {"sliding_window": 5}, {"tune": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_have_branches_of_their_own(kind: str, options: dict[str, Any], target: Any) -> None:
    prompts = Prompts.of((12, 5, 9))
    prompts.ids[0, -12:] = make_prompt(4).repeat(1, 3)
    call = {"attention_mask": prompts.mask, "max_new_tokens": NUM_NEW}

    pair = runs.both(target, make(target, kind, **options), prompts.ids, **call)

    pair.assert_equal()
    assert "tune" in options or len(pair.stats.kept_by_depth) == 6


def test_rows_sampled_together_are_those_sampled_alone(target: Any) -> None:
    prompts = torch.cat([LOOPING, make_prompt(15, seed=1)])

    assert_sampled_rows_are_single_runs(
        target, make(target, "falcon, grown"), prompts, temperature=0.3, max_new_tokens=24
    )


@pytest.mark.parametrize("verifier", ["gumbel", "recursive_rejection", "traversal"])
def test_rules_that_compare_draws_get_no_branch(verifier: str, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = []
    with_chain = proposing.with_chain
    monkeypatch.setattr(proposing, "with_chain", lambda *args: joined.append(1) or with_chain(*args))

    runs.drafted(target, make(target, "falcon, grown", verifier=verifier), LOOPING, do_sample=True)

    assert bool(joined) == (verifier == "gumbel")  # whose text does not depend on what is drafted


def looped(twins: Twins) -> Twins:
    """Both generators with a branch of text, over texts that go round, each in its own way."""
    for row, text in enumerate(twins.texts):
        text.ids[0, 30:] = text.ids[0, 30 : 33 + row].repeat(100)[:170]
    return twins


def start(name: str, num_rows: int = 2, **options: Any) -> Twins:
    model, drafter = make_pair(name)
    drafter.generation_config.prompt_lookup_num_tokens = 6
    return looped(Twins(name, num_rows, pair=(model, drafter), **options))


def decode(twins: Twins, temperature: float | None = None) -> list[int]:
    """Many steps; the drafter's passes in each."""
    num_rows, num_passes = len(twins.texts), []
    for step in range(14):
        depths = [100 if (step + row) % 5 else 3 for row in range(num_rows)]
        plain, fixed = twins.drafts(depths, temperature)
        assert plain is not None
        assert_same(plain, fixed, num_rows)
        for row in range(num_rows):
            assert len(set(paths(plain, row))) == len(paths(plain, row))
        assert fixed.num_passes == plain.num_passes
        num_passes.append(plain.num_passes)
        twins.give([6 if step else 12] * num_rows, is_kept=step > 0 and step % 3 != 1)
    return num_passes


FIXED = ("falcon-2 with a transition, static", "falcon-2 of tokens, grown", "eagle-1, static", "eagle-3, grown")


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_fixed_shapes_draft_the_same(name: str, temperature: float | None) -> None:
    num_passes = decode(start(name, most_first=12), temperature)

    assert 0 in num_passes
    assert num_passes[0] > 0


@pytest.mark.parametrize("name", FIXED)
def test_work_that_is_replayed_drafts_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tapes = tape.install(monkeypatch)
    twins = start(name, most_first=12)

    decode(twins)

    # the pairs of a step and of many, pairs that a step kept, drafts, these with the branch, roots, these with the branch
    assert 6 <= len(tapes) == len(twins.buffers.repeated) <= 7


@pytest.mark.parametrize("name", FIXED)
def test_nothing_is_asked_of_the_host(name: str) -> None:
    twins, budget = start(name, most_first=40), DraftBudget((100, 100), 512)
    twins.give([12, 12])
    on_meta(twins)
    kept = as_kept(merged([text.more(3) for text in twins.texts]))
    moved = (part.to("meta") for part in (kept.token_ids, kept.features, kept.num))
    twins.fixed.commit_kept(Kept(*moved, kept.num_new, kept.new_ids))

    branch = twins.fixed.repeated_text.branch(budget.depths, budget.num_nodes - 1)
    draft = twins.fixed.propose_tree(budget)
    drafts = [twins.fixed._joined(each, branch, budget) for each in (draft, twins.fixed._roots_alone())]

    assert [each.token_ids.shape[1] for each in drafts] == [draft.token_ids.shape[1] + 6, 7]
    assert {part.device.type for each in drafts for part in (each.token_ids, each.parents)} == {"meta"}


def test_budgets_limit_branches() -> None:
    twins = start("falcon-2 of tokens, grown")
    twins.drafts((100, 100))  # what comes now is no prompt
    twins.give([60, 60])

    def nodes(**limits: Any) -> int:
        twins.give([1, 1])
        budget = DraftBudget((100, 100), **{"num_nodes": 512, "num_passes": 1, **limits})
        return twins.plain.propose(budget).token_ids.shape[1]

    dear = Prices(torch.arange(512) * 9.0, [0.0] * 9, [1.0] * 9, torch.ones(9), 0)
    assert nodes() > nodes(num_nodes=13) == 13
    assert nodes(is_chain=True) == 3
    assert nodes(prices=dear) == 1
    assert nodes(num_passes=None) == nodes(num_passes=None, is_chain=True) == 7  # the branch alone


def test_the_drafter_reads_up_at_times() -> None:
    twins = start("falcon-2 of tokens, grown", num_rows=1)
    (text,), num_passes = twins.texts, []
    text.ids, text.features = text.ids[:, -99:].repeat(1, 5), text.features[:, -99:].repeat(1, 5, 1)

    for _ in range(60):
        twins.plain.commit(text.more(6))
        num_passes.append(twins.plain.propose(DraftBudget((100,), 512)).num_passes)

    assert sum(num > 0 for num in num_passes[3:]) == 2


def test_other_drafters_refuse_the_options(target: Any) -> None:
    drafter = make_medusa(target)
    drafter.generation_config = SpeculationConfig(prompt_lookup_num_tokens=4)

    with pytest.raises(OptionError, match="drafts no branch of repeated text"):
        runs.drafted(target, drafter)


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": -1}, {"max_matching_ngram_size": 0}])
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="must be at least"):
        SpeculationConfig(**options)


def test_the_option_of_a_call_is_refused(target: Any) -> None:
    with pytest.raises(GenerationError, match="repeated text is a branch of its drafts"):
        runs.drafted(target, make(target, "falcon, static"), prompt_lookup_num_tokens=5)
