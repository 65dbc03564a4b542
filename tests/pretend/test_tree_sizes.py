"""On a device with CUDA's rules trees that grow have as many nodes as a captured read takes for little more than the root alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import runs
from tests.drafters.tree_drafting.test_tree_sizes import make_grown, sizes_read
from tests.fake_cuda import FakeGraph, fake_cuda
from tests.pretend.device import cuda, to_device
from tests.tiny import make_eagle, make_prompt, make_target
from transformers_falcon_spec import FalconSpecDrafter, SpeculationConfig
from transformers_falcon_spec.drafters.tree_drafting.text import DraftText

__all__ = ["cuda", "fake_cuda", "sizes_read"]
pytestmark = [pytest.mark.families, pytest.mark.pretend]
MODELS = Path(__file__).parents[2] / "models"
LOOPING = make_prompt(3).repeat(1, 5)  # three tokens that come again and again
BRANCH = {"prompt_lookup_num_tokens": 10}


@pytest.mark.parametrize(
    ("num_rows", "options", "sizes"),
    [
        (1, {}, {64}),
        (2, {}, {64}),
        (1, BRANCH, {54, 64}),  # without and with a branch of repeated text
        (4, BRANCH, {22, 32}),
        (8, BRANCH, {16, 26}),
        (1, {"num_tree_nodes": 16, **BRANCH}, {16, 26}),
    ],
    ids=str,
)
def test_the_nodes_of_all_rows_are_read_for_little(
    num_rows: int, options: dict[str, Any], sizes: set[int], cuda: type[FakeGraph], sizes_read: set[int]
) -> None:
    target = make_target().double()
    prompts = torch.cat([LOOPING, *(make_prompt(LOOPING.shape[1], seed) for seed in range(1, num_rows))])
    plain = runs.plain(target, prompts).sequences
    drafter = make_grown(target, capture=True, **options)
    target, drafter, prompts = map(to_device, (target, drafter, prompts))

    output = runs.drafted(target, drafter, prompts)

    assert output.sequences.tolist() == plain.tolist()
    assert output.speculation.notes == []
    assert sizes_read <= sizes
    assert max(sizes_read) == max(sizes)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5"])
def test_layers_that_are_not_dense_read_16_nodes(family: str, cuda: type[FakeGraph], sizes_read: set[int]) -> None:
    target, prompt = make_target(family), make_prompt()
    drafter = make_grown(target, capture=True)
    target, drafter, prompt = map(to_device, (target, drafter, prompt))

    output = runs.drafted(target, drafter, prompt)

    assert output.speculation.notes == []
    assert sizes_read == {16}


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"])
def test_large_trees_of_the_embedded_pair_are_kept_and_its_text_is_the_same(
    options: dict[str, Any], cuda: type[FakeGraph], sizes_read: set[int]
) -> None:
    target: Any = AutoModelForCausalLM.from_pretrained(MODELS / "reference-target")
    drafter: Any = FalconSpecDrafter.from_pretrained(MODELS / "falcon-reference")
    prompt = make_prompt()
    call = {"max_new_tokens": 40, **options}
    plain = runs.plain(target, prompt, **call).sequences
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    target, drafter, prompt = map(to_device, (target, drafter, prompt))

    output = runs.drafted(target, drafter, prompt, **call)

    assert output.sequences.tolist() == plain.tolist()
    assert 54 in sizes_read
    assert sizes_read <= {54, 64}
    assert output.speculation.acceptance_length > 2


def test_drafters_of_one_token_a_pass_have_the_slots_from_the_start(
    cuda: type[FakeGraph], sizes_read: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = make_target(), make_prompt()
    drafter = make_eagle(target)
    plain = runs.plain(target, prompt).sequences
    drafter.generation_config = SpeculationConfig(tree_depth=4, capture=True, tune=False)
    target, drafter, prompt = map(to_device, (target, drafter, prompt))
    grow = DraftText._grow
    grown: list[DraftText] = []

    def noted(self: DraftText) -> None:
        grown.append(self)
        grow(self)

    monkeypatch.setattr(DraftText, "_grow", noted)

    output = runs.drafted(target, drafter, prompt)

    assert output.sequences.tolist() == plain.tolist()
    assert sizes_read == {64}
    assert grown == []
