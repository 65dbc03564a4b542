"""Generators of this package inside Transformers' own assisted decoding."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import Draft, TreeCandidateGenerator, disable, enable
from transformers_falcon_spec.core.sampling import private_generator
from transformers_falcon_spec.errors import DraftTreeError
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget
from transformers_falcon_spec.generation.target import Target


def ride_the_stock_loop(
    target: PreTrainedModel, drafter: Any, prompt: torch.Tensor | None = None
) -> tuple[Any, TreeCandidateGenerator]:
    """Text written by Transformers' own assisted decoding, with only its choice of a generator replaced."""
    max_length = 36 if prompt is None else prompt.shape[1] + 24
    generator = drafter.candidate_generator(Target(target, drafter.feature_layers), max_length, private_generator())
    target._get_candidate_generator = lambda **_: generator
    disable()
    try:
        return runs.plain(target, prompt, prompt_lookup_num_tokens=3), generator
    finally:
        enable()


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom"])
@pytest.mark.parametrize("block_size", [1, 3])
def test_stock_loop_with_a_falcon_generator_writes_the_greedy_text(family: str, block_size: int) -> None:
    target = make_target(family).double()
    gold = runs.plain(target).sequences

    out, _ = ride_the_stock_loop(target, InformedDrafter(make_drafter(target, block_size=block_size), gold))

    assert out.sequences.equal(gold)


def test_stock_loop_hands_over_one_pair_for_each_token_of_the_text() -> None:
    target = make_target().double()
    gold = runs.plain(target).sequences
    drafter = RandomDrafter(feature_layers=(1, -1))

    ride_the_stock_loop(target, InformedDrafter(drafter, gold))

    commits = drafter.generators[0].commits
    with torch.no_grad():
        states = target(gold, use_cache=False, output_hidden_states=True).hidden_states
    features = torch.cat([commit.features for commit in commits], dim=1)
    assert max(commit.num_new[0] for commit in commits[1:]) > 1
    assert features.shape[1] == commits[-1].lengths[0] - 1
    expected = torch.cat([states[1], states[-1]], dim=-1)[:, : features.shape[1]]
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-9)


def test_stock_loop_gets_no_logits_and_nothing_beyond_the_end() -> None:
    target = make_target()
    drafter = RandomDrafter()
    generator = drafter.candidate_generator(Target(target, ()), 14, private_generator())
    prompt = make_prompt(12)
    outputs = target(prompt, output_hidden_states=True)

    first = generator.get_candidates(prompt, is_first_iteration=True)
    candidates, logits = generator.get_candidates(torch.cat([prompt, prompt[:, :1]], dim=-1), {}, outputs)

    assert first[0].equal(prompt)
    assert first[1] is None
    assert logits is None
    assert candidates.shape[1] == 13  # one token is left, and that is the target's own


def test_nothing_is_learnt_from_update_candidate_strategy() -> None:
    generator = RandomDrafter().candidate_generator(None, 10, private_generator())

    assert generator.update_candidate_strategy(make_prompt(), torch.zeros(1, 1), 0) is None


def test_a_generator_must_write_both_methods() -> None:
    class Committing(TreeCandidateGenerator):
        def commit(self, committed: Committed) -> None:
            """Keep nothing."""

    with pytest.raises(TypeError, match=r"abstract method '?propose'?"):
        Committing(None, None, 10, private_generator())


def test_a_generator_without_select_rows_keeps_its_rows() -> None:
    class Staying(TreeCandidateGenerator):
        def commit(self, committed: Committed) -> None:
            """Keep nothing."""

        def propose(self, budget: DraftBudget) -> None:
            """Draft nothing."""

    generator = Staying(None, None, 10, private_generator())

    assert generator.why_rows_stay == "a `Staying` has no `select_rows`"


class Forgetful(RandomDrafter):
    """A user's own drafter, whose second draft is what `propose` makes of the newest tokens `[rows, 1]`."""

    def __init__(self, propose: Any) -> None:
        super().__init__(tune=False)
        self.propose = propose

    def candidate_generator(self, target: Any, max_length: int, rng: torch.Generator) -> Any:
        return ForgetfulGenerator(self, target, max_length, rng)


class ForgetfulGenerator(TreeCandidateGenerator):
    def commit(self, committed: Committed) -> None:
        lengths = torch.tensor(committed.lengths)
        self.is_first = committed.num_new[0] > 1
        self.newest = committed.sequence_ids.gather(1, lengths[:, None] - 1)

    def propose(self, budget: DraftBudget) -> Any:
        return chain_of(self.newest) if self.is_first else self.drafter.propose(self.newest)


def chain_of(token_ids: torch.Tensor, first: int = -1) -> Draft:
    """A chain of three such tokens in each row."""
    return Draft(token_ids.repeat(1, 3), torch.arange(first, first + 3)[None])


@pytest.mark.parametrize(
    ("propose", "message"),
    [
        (lambda newest: chain_of(newest + 1), "must be the newest token of the row, and .* after the tokens"),
        (lambda newest: chain_of(newest, first=0), "each node must stand behind its parent"),
        (lambda newest: Draft(newest.repeat(1, 3), torch.tensor([[-1, 2, 0]])), "each node must stand behind its"),
        (lambda newest: Draft(newest.repeat(1, 3), torch.arange(-1, 2)), r"has \[1, 3\] and \[3\]"),
        (lambda newest: Draft(newest[0].repeat(3), torch.arange(-1, 2)[None]), r"has \[3\] and \[1, 3\]"),
        (lambda newest: newest.repeat(1, 3), "`ForgetfulGenerator` returned a `Tensor`"),
    ],
)
def test_what_is_no_tree_below_the_newest_token_is_refused(propose: Any, message: str) -> None:
    with pytest.raises(DraftTreeError, match=message):
        runs.drafted(make_target(), Forgetful(propose))


def test_a_generator_that_drafts_the_last_token_again_writes_the_text_of_the_target() -> None:
    target = make_target()
    prompt = make_prompt(12)
    out = runs.drafted(target, Forgetful(chain_of), prompt, max_new_tokens=100)

    assert out.sequences.equal(runs.plain(target, prompt, max_new_tokens=100).sequences)
    assert out.speculation.num_accepted > 0
