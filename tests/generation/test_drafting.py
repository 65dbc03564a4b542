"""The interface of generators."""

import pytest

from tests.tiny import make_prompt
from transformers_falcon_spec import TreeCandidateGenerator
from transformers_falcon_spec.core.sampling import private_generator
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget


def test_a_generator_must_write_both_methods() -> None:
    generator = TreeCandidateGenerator(None, 10, private_generator())

    with pytest.raises(NotImplementedError):
        generator.propose(DraftBudget((1,), 2))
    with pytest.raises(NotImplementedError):
        generator.commit(Committed(make_prompt(), (12,), (11,), None))
