"""The cost model of several devices against simulated clocks, and its measurements against a scripted clock."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.drafters.easyspec.kinds import GROUPS, make_drafter, make_model
from tests.tiny import make_prompt
from transformers_falcon_spec.drafters.easyspec.families import LayeredModel
from transformers_falcon_spec.evaluation import layer_group_costs
from transformers_falcon_spec.evaluation.draft_replay import StepCounts
from transformers_falcon_spec.evaluation.layer_group_costs import (
    LINK_BYTES,
    MAX_DEVICES,
    Costs,
    Link,
    StepModel,
    measure_costs,
    measure_link,
    pass_seconds,
    pass_traffic,
)
from transformers_falcon_spec.generation.distributed import Processes

COSTS = Costs(attend=7.0, finish=11.0, layer=19.0, ends=5.0, read=50.0, state_bytes=64)
LINK = Link(latency_seconds=0.5, bytes_per_second=128.0)
DIVISIONS = [[[0], [1], [2], [3], [4]], GROUPS, [[0], [1, 2, 3, 4, 5], [6]], [[0], [1, 2, 3], [4, 5, 6, 7], [8]]]


def simulated(groups: Sequence[Sequence[int]], num_devices: int) -> tuple[float, int, int]:
    """The slowest device's clock after one pass, exchanges, and bytes that the first received, hop by hop."""
    clocks, num_exchanges, received = [COSTS.ends] * num_devices, 0, [0] * num_devices
    for group in groups:
        if len(group) == 1:
            clocks = [clock + COSTS.layer for clock in clocks]
            continue
        share = next(number for number in range(1, len(group) + 1) if number * num_devices >= len(group))
        for layer in range(len(group)):
            clocks[layer // share] += COSTS.attend
        if num_devices > 1:
            num_exchanges += 1
            for _ in range(num_devices - 1):  # each hop, all ranks hand the part that they got last to their neighbour
                begin = max(clocks)
                clocks = [
                    begin + LINK.latency_seconds + share * COSTS.state_bytes / LINK.bytes_per_second
                ] * num_devices
                received = [num + share * COSTS.state_bytes for num in received]
        for _ in group:
            clocks = [clock + COSTS.finish for clock in clocks]
    return max(clocks), num_exchanges, received[0]


@pytest.mark.parametrize("groups", DIVISIONS)
@pytest.mark.parametrize("num_devices", range(1, MAX_DEVICES + 1))
def test_a_pass_takes_what_simulated_clocks_say(groups: Sequence[Sequence[int]], num_devices: int) -> None:
    seconds, num_exchanges, num_bytes = simulated(groups, num_devices)

    assert pass_seconds(groups, num_devices, COSTS, LINK) == pytest.approx(seconds, rel=1e-12)
    assert pass_traffic(groups, num_devices, COSTS.state_bytes) == (num_exchanges, num_bytes)


def test_a_step_is_its_exact_pass_its_rough_ones_and_all_else() -> None:
    model, steps = StepModel(COSTS, 100.0, LINK), StepCounts(num_steps=4, num_accepted=8, num_passes=13, num_drafts=3)
    rough = pass_seconds(GROUPS, 2, COSTS, LINK)

    found = model.on_devices(GROUPS, steps)

    assert model.draft_seconds(GROUPS, steps, 2) == (3 * 50 + 10 * rough) / 4
    assert [each["devices"] for each in found] == list(range(1, 7 + 1))  # no more than layers
    words = 4 * LINK.latency_seconds  # a draft and its accepted path, each with its length
    assert found[0]["tokens_per_second"] == 3 / (model.draft_seconds(GROUPS, steps, 1) + 100)
    assert found[1]["tokens_per_second"] == 3 / ((3 * 50 + 10 * rough) / 4 + 100 + words)
    assert len(model.on_devices([[0], [1, 2, 3, 4, 5, 6, 7], [8], [9]], steps)) == MAX_DEVICES
    assert (found[1]["gathers_per_pass"], found[1]["bytes_per_pass"]) == (2, (1 + 2) * 64)
    assert [each["devices"] for each in StepModel(COSTS, 100.0, None).on_devices(GROUPS, steps)] == [1]


class Clock:
    """A clock that advances by one whenever it is read, and by what a test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_parts_are_timed_apart_and_the_drafter_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, clock = make_drafter(make_model("llama")), Clock()
    monkeypatch.setattr(layer_group_costs, "_now", clock)
    attend, before = LayeredModel.attend, set(vars(drafter.layered))

    def slow(*args: Any) -> Any:
        clock.now += 9
        return attend(*args)

    monkeypatch.setattr(LayeredModel, "attend", slow)
    found = measure_costs(drafter, make_prompt(6), width=3, num_new=2, repeats=2)

    # 5 layers between the ends; a part takes one look at its begin and one at its end
    assert found == Costs(
        attend=10, finish=1, layer=1, ends=13.0, read=2 * 7 + 1, state_bytes=3 * drafter.model.config.hidden_size * 8
    )
    assert set(vars(drafter.layered)) == before


def test_a_link_is_found_from_its_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(layer_group_costs, "_now", clock)

    class Three(Processes):
        num = 3

        def all_gather(self, part: torch.Tensor) -> torch.Tensor:
            clock.now += LINK.gather_seconds(3, part.nbytes) - 1  # the look takes the one
            return part

    found = measure_link(Three(), torch.device("cpu"), repeats=3)

    assert found.latency_seconds == pytest.approx(LINK.latency_seconds, rel=1e-3)
    assert found.bytes_per_second == pytest.approx(LINK.bytes_per_second, rel=1e-6)
    assert LINK_BYTES[0] < LINK_BYTES[1]
