"""The counts of a replay are those of a real call."""

from typing import Any

import pytest

from tests.drafters.easyspec.kinds import GROUPS, make_model
from tests.tiny import make_prompt
from transformers_falcon_spec import LayerParallelDrafter, SpeculationConfig
from transformers_falcon_spec.evaluation.draft_replay import DraftReplay, StepCounts, WrittenText
from transformers_falcon_spec.evaluation.layer_groups import (
    Groups,
    single_layers,
)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, LayerParallelDrafter]:
    target = make_model("llama")
    drafter = LayerParallelDrafter.wrap(make_model("llama"), target, group_size=2)
    drafter.generation_config = SpeculationConfig(tree_depth=2)
    return target, drafter


@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("groups", [single_layers(7), GROUPS, [[0], [1, 2, 3, 4, 5], [6]]])
def test_a_replay_counts_what_the_call_itself_counts(
    pair: tuple[Any, LayerParallelDrafter], groups: Groups, width: int, ends_early: bool
) -> None:
    target, drafter = pair
    options = SpeculationConfig(tune=False, tree_depth=4, tree_top_k=width, num_tree_nodes=9)
    prompt, limit = make_prompt(9), {"max_new_tokens": 24, "do_sample": False}
    text = target.generate(prompt, **limit)[0].tolist()
    if ends_early:
        limit["eos_token_id"] = text[22]
        text = text[: text.index(text[22], 9) + 1]
    before = (drafter.config.layer_groups, drafter.config.backend, drafter.generation_config.tree_depth)

    found = DraftReplay(target, drafter, options, 24).count(WrittenText(tuple(text), 9), groups)

    assert (drafter.config.layer_groups, drafter.config.backend, drafter.generation_config.tree_depth) == before
    same = LayerParallelDrafter.wrap(drafter.model, target, layer_groups=groups, backend="sequential")
    same.generation_config = options
    out = target.generate(prompt, assistant_model=same, return_dict_in_generate=True, **limit)
    stats = out.speculation
    assert out.sequences[0].tolist() == text
    assert (found.num_steps, found.num_accepted, found.num_passes) == (
        stats.num_steps,
        stats.num_accepted,
        stats.num_passes,
    )
    assert found.acceptance_length == stats.acceptance_length > 1
    assert 0 < found.num_drafts <= found.num_steps


def test_counts_of_steps_add_up() -> None:
    assert StepCounts(1, 2, 3, 1) + StepCounts(10, 20, 30, 9) == StepCounts(11, 22, 33, 10)
    assert StepCounts().acceptance_length == 1
