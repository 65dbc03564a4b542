"""What a generator must have, and what its drafts must be."""

from typing import Any

import pytest
import torch

from tests import runs
from tests.doubles import RandomDrafter
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import Draft, TreeCandidateGenerator
from transformers_falcon_spec.core.sampling import private_generator
from transformers_falcon_spec.errors import DraftTreeError
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget


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
    feature_layers = ()

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
