"""Which layers should attend at once: replays against real calls, and the best divisions against trying all of them."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

from tests.drafters.easyspec.kinds import GROUPS, make_model
from tests.tiny import make_prompt
from transformers_falcon_spec import LayerParallelDrafter, SpeculationConfig
from transformers_falcon_spec.evaluation.drafted_texts import Text
from transformers_falcon_spec.evaluation.group_fit import (
    Groups,
    Replay,
    Steps,
    best_divisions,
    candidate_groups,
    singles,
    with_group,
)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, LayerParallelDrafter]:
    target = make_model("llama")
    drafter = LayerParallelDrafter.wrap(make_model("llama"), target, group_size=2)
    drafter.generation_config = SpeculationConfig(tree_depth=2)
    return target, drafter


@pytest.mark.parametrize("ends_early", [False, True])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("groups", [singles(7), GROUPS, [[0], [1, 2, 3, 4, 5], [6]]])
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

    found = Replay(target, drafter, options, 24).steps(Text(tuple(text), 9), groups)

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


def test_steps_add_up() -> None:
    assert Steps(1, 2, 3, 1) + Steps(10, 20, 30, 9) == Steps(11, 22, 33, 10)
    assert Steps(0, 0, 0, 0).acceptance_length == 1


def test_candidates_leave_the_first_and_the_last_layer_alone() -> None:
    assert candidate_groups(5, 4) == [(1, 2), (2, 2), (1, 3)]
    assert with_group(5, 2, 2) == [[0], [1], [2, 3], [4]]
    assert singles(3) == [[0], [1], [2]]


def every_division(num_layers: int, losses: dict[tuple[int, int], float]) -> dict[int, float]:
    """The least loss of every number of groups, by trying all divisions."""
    least: dict[int, float] = {}
    for num_cuts in range(num_layers - 2):
        for cuts in combinations(range(2, num_layers - 1), num_cuts):
            bounds = [1, *cuts, num_layers - 1]
            sizes = [end - start for start, end in pairwise(bounds)]
            pieces = list(zip(bounds, sizes, strict=False))
            if any(size > 1 and (start, size) not in losses for start, size in pieces):
                continue
            loss = sum(losses[piece] for piece in pieces if piece[1] > 1)
            least[num_cuts + 3] = min(least.get(num_cuts + 3, loss), loss)
    return least


@pytest.mark.parametrize("num_layers", [4, 7, 10])
@pytest.mark.parametrize("max_size", [2, 3, 5])
def test_divisions_are_the_best_of_all(num_layers: int, max_size: int) -> None:
    draws = torch.Generator().manual_seed(num_layers + max_size)
    candidates = candidate_groups(num_layers, max_size)
    losses = dict(zip(candidates, (torch.rand(len(candidates), generator=draws) - 0.1).tolist(), strict=True))

    found = best_divisions(num_layers, losses)

    expected = every_division(num_layers, losses)
    assert [len(groups) for groups in found] == sorted(expected, reverse=True)
    for groups in found:
        assert [layer for group in groups for layer in group] == list(range(num_layers))
        assert len(groups[0]) == len(groups[-1]) == 1
        loss = sum(losses[group[0], len(group)] for group in groups if len(group) > 1)
        assert loss == pytest.approx(expected[len(groups)])
