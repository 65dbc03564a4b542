"""The tape that stands for a captured graph on a CPU: it repeats right work, and shows what a capture would freeze."""

from typing import Any

import pytest
import torch

from tests.tape import taped


def test_a_replay_repeats_work_on_what_its_tensors_hold_then() -> None:
    total, step = torch.zeros(1, 2), torch.ones(1, 2)

    replay = taped(lambda: total.add_((step * 2)[:, :1].expand(1, 2)))
    step.fill_(5)
    replay()

    assert total.tolist() == [[12, 12]]


@pytest.mark.parametrize("modes", [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)])
def test_a_replay_may_come_in_another_mode_than_the_work(modes: tuple[Any, Any]) -> None:
    total = torch.zeros(1)
    of_work, of_replay = modes

    with of_work():
        replay = taped(lambda: total.add_(torch.ones(1) * 2))
    with of_replay():
        replay()

    assert total.tolist() == [4]


@pytest.mark.parametrize("fault", ["a value of the host", "a new tensor"])
def test_what_a_capture_would_freeze_is_frozen(fault: str) -> None:
    held = {"length": torch.ones(1, 1), "total": torch.zeros(1, 1)}

    def work() -> None:
        if fault == "a new tensor":
            held["length"] = held["length"] + 1
            held["total"].add_(held["length"])
        else:
            held["length"].add_(1)
            held["total"].add_(held["length"].tolist()[0][0])

    replay = taped(work)
    replay()
    frozen = float(held["total"])

    held.update(length=torch.ones(1, 1), total=torch.zeros(1, 1))
    work()
    work()
    assert (frozen, float(held["total"])) == (4, 5)
