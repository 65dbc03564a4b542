"""Whether a target can be drafted for is known before work begins, and why not is said."""

import pytest

from tests.families import FAMILIES
from tests.tiny import make_target
from transformers_falcon_spec.errors import GenerationError, TargetError
from transformers_falcon_spec.generation.eligible import check_target

RECURRENT = [name for name, family in FAMILIES.items() if family.form == "refused"]


@pytest.mark.parametrize("family", ["llama", "bloom", "lfm2"])
def test_a_target_that_reads_drafts_says_how(family: str) -> None:
    assert check_target(make_target(family)).form == FAMILIES[family].form


@pytest.mark.parametrize("family", RECURRENT)
def test_a_target_with_a_recurrent_state_is_refused_before_any_forward(family: str) -> None:
    target = make_target(family)
    target.forward = None  # which nobody may call

    with pytest.raises(GenerationError, match="keeps a recurrent state"):
        check_target(target)


def test_a_target_that_cannot_be_probed_is_refused_in_words() -> None:
    target = make_target("llama")
    target.model.norm.register_forward_hook(lambda _module, _inputs, output: output.cumsum(1))  # not the token's own

    with pytest.raises(TargetError, match="cannot verify drafts"):
        check_target(target)
