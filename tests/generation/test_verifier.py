"""Verifiers through `generate`: the rule is the drafter's option, the text the target's, and a draft that does not suit is refused."""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import DraftTree, FalconSpecDrafter, SpeculationConfig
from transformers_falcon_spec.core.sampling import CoupledDraws, GeneratorDraws
from transformers_falcon_spec.core.verification import AcceptedPath, match_tokens
from transformers_falcon_spec.errors import GenerationError, OptionError
from transformers_falcon_spec.generation.acceptors import NodeScores, trees_of
from transformers_falcon_spec.generation.drafting import Committed, Draft, DraftBudget
from transformers_falcon_spec.generation.target import Target
from transformers_falcon_spec.generation.verifier import (
    TOKEN_MATCHING,
    VERIFIERS,
    Verifier,
    register_verifier,
    verifier_named,
)

TREE = DraftTree.from_lists([-1, 0, 0, 1, 1, 2, 3, 4, 0])
DRAWING = ("recursive_rejection", "traversal")


def drafter_with(verifier: str, target: Any, **options: Any) -> FalconSpecDrafter:
    drafter = make_drafter(target, block_size=2, draft_tree=TREE.to_json(), **options)
    drafter.generation_config = SpeculationConfig(verifier=verifier)
    return drafter


def written(target: Any, drafter: Any, seed: int, **options: Any) -> Any:
    """The dict that a sampled call returns."""
    prompt = make_prompt(6)
    torch.manual_seed(seed)
    settings = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 12, "return_dict_in_generate": True}
    return target.generate(prompt, assistant_model=drafter, **{**settings, **options})


@pytest.mark.parametrize("verifier", [*DRAWING, "gumbel", "token_matching"])
def test_every_rule_writes_within_limits_and_with_every_output(verifier: str) -> None:
    target = make_target()
    drafter = drafter_with(verifier, target)

    out = written(target, drafter, 0, top_p=0.9, repetition_penalty=1.1, output_scores=True, output_logits=True)

    assert out.sequences.shape == (1, 18)
    assert len(out.scores) == len(out.logits) == 12
    assert out.speculation.num_drafted > 0
    for step in range(12):  # each token was possible where it stands
        assert out.scores[step][0, out.sequences[0, 6 + step]] > -torch.inf
    assert out.past_key_values.get_seq_length() == 17


@pytest.mark.parametrize("verifier", [*DRAWING, "gumbel"])
def test_text_ends_at_the_end_token(verifier: str) -> None:
    target = make_target()
    target.generation_config.eos_token_id = list(range(0, 96, 3))

    for seed in range(6):
        new = written(target, drafter_with(verifier, target), seed).sequences[0, 6:].tolist()
        assert all(token % 3 for token in new[:-1])
        assert new[-1] % 3 == 0 or len(new) == 12


@pytest.mark.parametrize("verifier", [*DRAWING, "gumbel"])
def test_greedy_decoding_walks_under_every_rule(verifier: str) -> None:
    target = make_target().double()

    runs.informed(target, drafter_with(verifier, target).double(), make_prompt(5), do_sample=False).assert_equal()


def test_gumbel_coupling_writes_one_text_for_a_seed_whatever_the_drafter() -> None:
    target = make_target().double()
    other = make_target(seed=5).double()
    falcon = drafter_with("gumbel", target).double()
    random_drafter = RandomDrafter()
    random_drafter.generation_config = SpeculationConfig(verifier="gumbel")

    for seed in range(3):
        text = written(target, falcon, seed, max_new_tokens=24).sequences
        drafters = [random_drafter, drafter_with("gumbel", other).double(), InformedDrafter(falcon, text)]
        assert all(written(target, drafter, seed, max_new_tokens=24).sequences.equal(text) for drafter in drafters)
        assert not written(target, falcon, seed + 10, max_new_tokens=24).sequences.equal(text)


@pytest.mark.parametrize("verifier", [*DRAWING, "gumbel", "token_matching"])
def test_a_second_call_without_a_new_seed_writes_another_text(verifier: str) -> None:
    target = make_target()
    drafter, options = drafter_with(verifier, target), {"do_sample": True, "max_new_tokens": 24}
    torch.manual_seed(0)

    first, second = (target.generate(make_prompt(6), assistant_model=drafter, **options) for _ in range(2))

    assert not first.equal(second)


FORESEEABLE = {
    "coupled": lambda: CoupledDraws(1),
    "a generator": lambda: GeneratorDraws(torch.Generator().manual_seed(1)),
    "the global stream": GeneratorDraws,
}


@pytest.mark.parametrize("make_draws", FORESEEABLE.values(), ids=FORESEEABLE.keys())
def test_a_drafter_that_sees_the_noise_knows_the_draws_to_come(make_draws: Any) -> None:
    vocab_size, count = 97, 60
    probs = torch.softmax(2 * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0)), dim=-1)
    probs[:, ::3] = 0  # as top-p leaves them
    probs /= probs.sum(-1, keepdim=True)
    draws = make_draws()

    for start in range(0, count, 4):
        noise = draws.noise_ahead(vocab_size, torch.device("cpu"))
        guesses = [int((probs[start + ahead] / noise(ahead + 1)).argmax()) for ahead in (2, 0, 1, 3)]
        drawn = [int(draws.categorical(probs[start + ahead][None])) for ahead in range(4)]
        assert guesses == [drawn[ahead] for ahead in (2, 0, 1, 3)]


def test_coupled_draws_have_the_distribution_they_are_given() -> None:
    probs, draws, count = torch.tensor([[0.5, 0.3, 0.15, 0.05, 0.0]]), CoupledDraws(3), 6000

    found = torch.bincount(torch.cat([draws.categorical(probs) for _ in range(count)]), minlength=5)

    expected = count * probs[0, :4]
    assert found[4] == 0
    assert (
        float(((found[:4] - expected) ** 2 / expected).sum()) < 16.3
    )  # probability 0.001 with three degrees of freedom


@pytest.mark.parametrize("verifier", DRAWING)
def test_a_draft_that_was_not_drawn_is_refused(verifier: str) -> None:
    drafter = RandomDrafter()
    drafter.generation_config = SpeculationConfig(verifier=verifier)

    with pytest.raises(OptionError, match=f'verifier="{verifier}"` needs a draft that was drawn'):
        written(make_target(), drafter, 0)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(OptionError, match=r"`verifier` must be one of .* but it is 'typical'.* import the module"):
        SpeculationConfig(verifier="typical")


def test_lookahead_nodes_never_become_text() -> None:
    ids, parents = torch.tensor([[4, 5, 6], [4, 5, 6]]), torch.tensor([[-1, 0, 1]])
    drafts = [
        Draft(ids, parents, is_lookahead=is_lookahead) for is_lookahead in (None, torch.tensor([[0, 0, 1]]).bool())
    ]

    free, held = (trees_of(draft, TOKEN_MATCHING, [True, True], torch.device("cpu"))[1] for draft in drafts)

    assert match_tokens(free, [5, 6, 7].__getitem__).path == (0, 1, 2)
    assert match_tokens(held, [5, 6, 7].__getitem__).path == (0, 1)


def test_a_rule_from_outside_writes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers_falcon_spec.generation.verifier.VERIFIERS", dict(VERIFIERS))
    rule = Verifier("one_token", lambda scores: match_tokens(scores.tree, scores.token_after, max_tokens=1))
    register_verifier(rule)
    target = make_target().double()
    drafter = drafter_with("one_token", target).double()

    outputs = runs.informed(target, drafter, make_prompt(6), do_sample=True, max_new_tokens=12)

    outputs.assert_equal(is_kept=False)
    assert outputs.drafted.speculation.num_accepted == 0
    with pytest.raises(OptionError, match="must be new, but 'one_token' is taken"):
        register_verifier(rule)
    again = replace(rule)
    assert verifier_named(register_verifier(again, replace=True).name) is again


def test_only_rules_that_run_to_the_end_of_token_matching_are_written_token_by_token() -> None:
    assert {name for name, rule in VERIFIERS.items() if rule.is_token_matching} == {"token_matching", "gumbel"}
    assert replace(TOKEN_MATCHING, name="my_name").is_token_matching


def register_three_at_most(monkeypatch: pytest.MonkeyPatch, **flags: bool) -> None:
    """Register a rule that matches tokens and stops after three of them."""
    monkeypatch.setattr("transformers_falcon_spec.generation.verifier.VERIFIERS", dict(VERIFIERS))
    rule = Verifier("three", lambda scores: match_tokens(scores.tree, scores.token_after, max_tokens=3), **flags)
    register_verifier(rule)


@pytest.mark.parametrize("is_on_accelerator", [False, True])
def test_a_rule_that_runs_whole_leaves_the_draws_where_the_text_ends(
    is_on_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_three_at_most(monkeypatch, asks_in_order=True, keeps_seeded_text=True)
    monkeypatch.setattr(NodeScores, "is_on_accelerator", is_on_accelerator)
    target, prompt = make_target().double(), make_prompt(6)
    drafter = RandomDrafter(tune=False)
    drafter.generation_config.verifier = "three"
    options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 12}
    num_accepted = 0

    for seed in range(8):
        torch.manual_seed(seed)
        informed = InformedDrafter(drafter, target.generate(prompt, **options), hit_rate=1.0)  # goes on past the end
        ends = {**options, "eos_token_id": list(range(0, 96, 3))}
        torch.manual_seed(seed)
        plain = [target.generate(prompt, **ends).tolist() for _ in range(2)]
        torch.manual_seed(seed)
        calls = [
            target.generate(prompt, assistant_model=informed, return_dict_in_generate=True, **ends) for _ in range(2)
        ]

        assert [out.sequences.tolist() for out in calls] == plain
        num_accepted += sum(out.speculation.num_accepted for out in calls)
        assert all(max(out.speculation.acceptance_histogram, default=0) <= 2 for out in calls)
    assert num_accepted > 0


@functools.cache
def drawing_pair() -> tuple[Any, FalconSpecDrafter]:
    """A target and its drafter, made once: hundreds of drafts are drawn from them."""
    target = make_target()
    return target, drafter_with("traversal", target)


@torch.no_grad()
def drawn_draft(seed: int, temperature: float = 0.7) -> tuple[Any, Tensor]:
    target, drafter = drawing_pair()
    generator = drafter.candidate_generator(Target(target, (-1,)), 100, torch.Generator().manual_seed(seed))
    features = torch.randn(1, 7, drafter.config.feature_size, generator=torch.Generator().manual_seed(1))
    generator.commit(Committed(make_prompt(8), (8,), (7,), features))
    return generator.propose(DraftBudget((20,), 64, temperature=temperature)), generator.propose


def test_falcon_says_what_each_child_was_drawn_from() -> None:
    draft, _ = drawn_draft(0)
    parents, tokens = draft.parents[0].tolist(), draft.token_ids[0].tolist()

    inner = sorted({parent for parent in parents if parent >= 0})
    assert [node for node, dist in enumerate(draft.dist_index[0].tolist()) if dist >= 0] == inner
    assert sorted(draft.dist_index[0, inner].tolist()) == list(range(len(inner)))
    torch.testing.assert_close(draft.draft_probs.sum(-1), torch.ones(1, len(inner)))
    for parent in inner:
        children = [tokens[node] for node, above in enumerate(parents) if above == parent]
        assert len(set(children)) == len(children)


@pytest.mark.usefixtures("no_shape_checks")
def test_children_are_drawn_for_each_parent_anew_and_from_their_distribution() -> None:
    drafts = [drawn_draft(seed)[0] for seed in range(400)]
    pairs = [draft.token_ids[0, [3, 5]].tolist() for draft in drafts]  # first children of the nodes 1 and 2, one list
    first = torch.tensor([draft.token_ids[0, 1].item() for draft in drafts])
    probs = drafts[0].draft_probs[0, drafts[0].dist_index[0, 0]]

    assert any(one != other for one, other in pairs)
    best = probs.topk(3).indices
    for token in best.tolist():
        share, expected = float((first == token).float().mean()), float(probs[token])
        assert abs(share - expected) < 4 * (expected * (1 - expected) / len(drafts)) ** 0.5 + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("verifier", [*DRAWING, "gumbel", "token_matching"])
def test_texts_of_a_small_model_have_its_distribution(verifier: str) -> None:
    target = make_target(vocab_size=12)
    drafter, count, prompt = drafter_with(verifier, target), 3000, torch.tensor([[3, 7, 5]])
    with torch.no_grad():
        first = torch.softmax(target(prompt).logits[0, -1], dim=-1)
        second = torch.stack(
            [torch.softmax(target(torch.tensor([[3, 7, 5, token]])).logits[0, -1], dim=-1) for token in range(12)]
        )
    expected = count * (first[:, None] * second).flatten()
    found = torch.zeros(144)
    options = {"do_sample": True, "max_new_tokens": 2, "temperature": 1.0, "top_k": 0}

    for seed in range(count):
        torch.manual_seed(seed)
        one, two = target.generate(prompt, assistant_model=drafter, **options)[0, 3:].tolist()
        found[12 * one + two] += 1

    is_common = expected >= 5
    statistic = float(((found - expected) ** 2 / expected)[is_common].sum())
    degrees = int(is_common.sum())
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


WRONG_PATHS: dict[str, Any] = {  # of a chain; the rules get its tokens as the tree has them
    "an `AcceptedPath`, but `wrong` returned None": lambda _: None,
    "a path that begins at the root": lambda ids: AcceptedPath((1, 2), (ids[2], 5)),
    "a path that begins at the root, node 0, but": lambda _: AcceptedPath(),
    "one token more than accepted ones": lambda ids: AcceptedPath((0, 1), (ids[1],)),
    "the last being the bonus token, but": lambda _: AcceptedPath((0,), (5, 6)),
    "a bonus token of the target's vocabulary": lambda _: AcceptedPath((0,), (1_000_000,)),
    "each node is a child of the last, and": lambda ids: AcceptedPath((0, 2), (ids[2], 5)),
    "the token of `path[i + 1]`": lambda ids: AcceptedPath((0, 1), (ids[1] + 1, 5)),
    "on which each node": lambda _: AcceptedPath((0, 99), (5, 5)),
}


@pytest.mark.parametrize("message", WRONG_PATHS)
def test_what_a_rule_from_outside_returns_must_be_a_path_of_the_tree(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers_falcon_spec.generation.verifier.VERIFIERS", dict(VERIFIERS))
    register_verifier(Verifier("wrong", lambda scores: WRONG_PATHS[message](scores.tree.token_ids)))
    target = make_target()
    drafter = make_drafter(target, block_size=2, draft_tree=DraftTree.chain(3).to_json())
    drafter.generation_config = SpeculationConfig(verifier="wrong", tune=False)

    with pytest.raises(GenerationError, match=re.escape(message)) as error:
        written(target, drafter, 0)

    assert "but `wrong` returned" in str(error.value)


def test_greedy_calls_match_tokens_whatever_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers_falcon_spec.generation.verifier.VERIFIERS", dict(VERIFIERS))
    register_verifier(Verifier("never_asked", lambda _: None))  # type: ignore[arg-type, return-value]  # no path
    target = make_target().double()

    runs.informed(target, drafter_with("never_asked", target).double(), make_prompt(6)).assert_equal()
