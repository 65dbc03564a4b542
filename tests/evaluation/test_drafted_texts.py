"""Replays against real calls: what is counted without the target is what the call counts. EasySpec's are in `test_group_fit.py`."""

from typing import Any

import pytest

from tests import runs
from tests.drafters.diffuspec.stand_ins import make_diffusion
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec import DiffusionDrafter
from transformers_falcon_spec.drafters.diffuspec import NgramProxy
from transformers_falcon_spec.evaluation.drafted_texts import Text, counts
from transformers_falcon_spec.generation.target import Target

OPTIONS: dict[str, dict[str, Any]] = {
    "cps": {},
    "tree": {"search": "tree", "num_tree_nodes": 12},
    "approximate cache, two passes": {"attention": "full", "cache_rounds": 4, "num_steps": 2},
    "adaptive": {"draft_length": "adaptive", "min_draft_tokens": 2, "growth": 3},
    "confidence": {"draft_length": "confidence", "least_confidence": 0.3},
}
COUNTED = (
    "num_steps",
    "num_accepted",
    "num_drafted",
    "num_passes",
    "num_tokens",
    "acceptance_histogram",
    "kept_by_depth",
)


@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_replay_counts_what_the_call_itself_counts(kind: str, ends_early: bool) -> None:
    target = make_target(seed=7).double()
    options = dict(OPTIONS[kind])
    drafter = make_diffusion(target, **options)
    if kind == "cps":  # one that is often right
        drafter = DiffusionDrafter.from_target(target, num_hidden_layers=3, block_size=4).double().eval()
    drafter.generation_config.tune = False
    drafter.proxy = NgramProxy.fit([], 3, target.config.vocab_size)
    prompt, limit = make_prompt(), {"max_new_tokens": 24}
    text = runs.plain(target, prompt, **limit).sequences[0].tolist()
    if ends_early:
        limit["eos_token_id"] = text[-5]
        text = text[: text.index(text[-5], prompt.shape[1]) + 1]

    found = counts(Target(target, ()), drafter, Text(tuple(text), prompt.shape[1]), 24)

    out = runs.drafted(target, drafter, prompt, **limit)
    assert out.sequences[0].tolist() == text
    assert {name: getattr(found, name) for name in COUNTED} == {
        name: getattr(out.speculation, name) for name in COUNTED
    }
    assert found.num_drafted > 0
    assert kind != "cps" or found.num_accepted > 0
