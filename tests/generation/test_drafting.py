"""What a generator must have, and what it may leave out."""

import pytest

from transformers_falcon_spec import TreeCandidateGenerator
from transformers_falcon_spec.core.sampling import private_generator
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget


def test_a_generator_must_write_both_methods() -> None:
    class Committing(TreeCandidateGenerator):
        def commit(self, committed: Committed) -> None:
            """Keep nothing."""

    with pytest.raises(TypeError, match=r"abstract method '?propose'?"):
        Committing(None, 10, private_generator())


def test_a_generator_without_select_rows_keeps_its_rows() -> None:
    class Staying(TreeCandidateGenerator):
        def commit(self, committed: Committed) -> None:
            """Keep nothing."""

        def propose(self, budget: DraftBudget) -> None:
            """Draft nothing."""

    generator = Staying(None, 10, private_generator())

    assert generator.why_rows_stay == "a `Staying` has no `select_rows`"
