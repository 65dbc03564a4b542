"""The best divisions of layers, against trying all of them, and their speed on several devices, against simulated clocks."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch

from lab.layer_groups import (
    MAX_DEVICES,
    Link,
    StepModel,
    best_divisions,
    candidate_groups,
    with_group,
)
from tests.drafters.easyspec.kinds import GROUPS
from transformers_falcon_spec import GenerationStats

LINK = Link(latency_seconds=0.5, bytes_per_second=128.0)
MODEL = StepModel(drafter_pass=200.0, attend=7.0, elsewhere=100.0, state_bytes=64, link=LINK)
STATS = GenerationStats(num_steps=4, num_accepted=8, num_passes=13)
DIVISIONS = [[[0], [1], [2], [3], [4]], GROUPS, [[0], [1, 2, 3, 4, 5], [6]], [[0], [1, 2, 3], [4, 5, 6, 7], [8]]]


def test_candidates_leave_the_first_and_the_last_layer_alone() -> None:
    assert candidate_groups(5, 4) == [(1, 2), (2, 2), (1, 3)]
    assert with_group(5, 2, 2) == [[0], [1], [2, 3], [4]]
    assert with_group(3) == [[0], [1], [2]]


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


def simulated(groups: Sequence[Sequence[int]], num_devices: int) -> tuple[float, int]:
    """The slowest device's clock after a drafted pass, and the bytes that the first one received, hop by hop."""
    rest = MODEL.drafter_pass - MODEL.attend * sum(len(group) for group in groups if len(group) > 1)
    clocks, received = [rest] * num_devices, 0
    for group in (group for group in groups if len(group) > 1):
        share = next(number for number in range(1, len(group) + 1) if number * num_devices >= len(group))
        for layer in range(len(group)):
            clocks[layer // share] += MODEL.attend
        for _ in range(num_devices - 1):  # each hop, all devices hand the part that they got last to their neighbour
            sent = share * MODEL.state_bytes
            clocks = [max(clocks) + LINK.latency_seconds + sent / LINK.bytes_per_second] * num_devices
            received += sent
    return max(clocks), received


@pytest.mark.parametrize("groups", DIVISIONS)
def test_a_step_takes_what_simulated_clocks_say(groups: Sequence[Sequence[int]]) -> None:
    found = MODEL.on_devices(groups, STATS)

    assert [each["devices"] for each in found] == list(range(1, 1 + sum(map(len, groups))))[:MAX_DEVICES]
    for each in found:
        seconds, num_bytes = simulated(groups, each["devices"])
        assert each["draft_seconds"] == pytest.approx((4 * MODEL.drafter_pass + 9 * seconds) / 4, rel=1e-12)
        words = 4 * (each["devices"] - 1) * LINK.latency_seconds  # a draft and its accepted path, each with its length
        assert each["tokens_per_second"] == pytest.approx(3 / (each["draft_seconds"] + words + 100))
        assert each["bytes_per_pass"] == num_bytes
        assert each["gathers_per_pass"] == sum(len(group) > 1 for group in groups) * (each["devices"] > 1)


def test_one_device_is_modelled_without_a_link() -> None:
    alone = StepModel(drafter_pass=200.0, attend=7.0, elsewhere=100.0, state_bytes=64)

    (found,) = alone.on_devices(GROUPS, STATS)

    assert found == {**MODEL.on_devices(GROUPS, STATS)[0], "devices": 1}
