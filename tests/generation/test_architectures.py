"""Every family of the table: what its targets can verify, and the promise through `generate` with a drafter that is partly right."""

import re
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.families import DRAFTED, FAMILIES
from tests.tiny import in_double, make_target
from transformers_falcon_spec.errors import GenerationError, TargetError
from transformers_falcon_spec.generation.probe import probe

ATTENTIONS = ("eager", "sdpa")
CASES = [(family, attention) for family in FAMILIES for attention in ATTENTIONS]
VERIFYING = [case for case in CASES if case[0] in DRAFTED]
REFUSED = [case for case in CASES if FAMILIES[case[0]].form == "refused"]
# What the error says of targets whose state cannot be put aside.
REFUSALS = (
    "keeps a state outside of the recurrent layers of Transformers' `DynamicCache`, so that rejected drafts cannot be",
    "was given a cache, but gives none back",
    "takes its cache as `cache_params`, which cannot be drafted for. Update Transformers",
    "keeps no places of tokens, so that rejected drafts cannot be taken back. Update Transformers",
)
# Sampling differs from greedy decoding in its draws, not in what the target reads: each implementation has one of them by default.
USUAL = {("sampling", "eager"), ("greedy", "sdpa")}
TEXTS = [
    pytest.param(*case, mode, marks=[] if (mode, case[1]) in USUAL else [pytest.mark.slow])
    for case in VERIFYING
    for mode in ("greedy", "sampling")
]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.0, "top_k": 0},
}


@lru_cache(maxsize=1)  # the tests of one case come one after the other
def _target(family: str, attention: str) -> PreTrainedModel:
    try:
        return make_target(family, seed=7, attn_implementation=attention)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        pytest.skip(f"Transformers offers no {attention} attention for {family}")


# With the other implementation the text tells: `test_the_text_is_the_targets_own` asserts that only limited forms have notes.
@pytest.mark.parametrize("family", DRAFTED)
def test_the_probe_distinguishes_trees_from_chains(family: str) -> None:
    capability = probe(make_target(family, seed=7))

    assert capability.form == FAMILIES[family].form
    if capability.form == "tree":
        assert capability.tree_error <= 1e-4 * capability.control_error


@pytest.mark.parametrize(("family", "attention"), REFUSED)
def test_targets_whose_state_cannot_be_put_aside_are_refused_with_a_reason(family: str, attention: str) -> None:
    with pytest.raises((GenerationError, TargetError), match="|".join(map(re.escape, REFUSALS))):
        runs.drafted(_target(family, attention), RandomDrafter())


@pytest.mark.parametrize(("family", "attention", "mode"), TEXTS)
def test_the_text_is_the_targets_own(family: str, attention: str, mode: str) -> None:
    target = in_double(_target(family, attention))
    options = {"max_new_tokens": 16, **MODES[mode]}
    plain = runs.plain(target, **options).sequences
    state = torch.get_rng_state()

    drafted = runs.drafted(target, InformedDrafter(RandomDrafter(num_nodes=12), plain), **options)

    assert drafted.sequences.tolist() == plain.tolist()
    assert torch.get_rng_state().equal(state)
    assert drafted.speculation.num_accepted > 0
    is_limited = FAMILIES[family].form != "tree" or family == "deepseek_v32_sparse"
    assert bool(drafted.speculation.notes) == is_limited
