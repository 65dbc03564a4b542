"""Which of several drafters drafts, on speeds that are known."""

import pytest

from tests.generation.tuning.test_tuner import cpu, run_contest
from transformers_falcon_spec.generation.tuning.cost_model import CostModel
from transformers_falcon_spec.generation.tuning.tuner import LEAD, REST, TRIAL, select_drafter


class Clocked(CostModel):
    """A drafter of a known speed."""

    speed: float = 1.0

    @property
    def rate(self) -> float:
        return self.speed


def drafters(*speeds: float) -> list[Clocked]:
    found = []
    for speed in speeds:
        found.append(Clocked())
        found[-1].speed = speed
    return found


def test_each_has_a_trial_and_then_the_fastest_works() -> None:
    known, current, asked = drafters(1.0, 3.0, 2.0), 0, []
    for _ in range(3 * TRIAL + 100):
        current = select_drafter(known, current)
        asked.append(current)

    assert asked[: 3 * TRIAL] == [number for number in range(3) for _ in range(TRIAL)]
    assert set(asked[3 * TRIAL :]) == {1}


def test_one_that_is_hardly_faster_does_not_take_over() -> None:
    known = drafters(1.0, LEAD - 0.01)
    for one in known:
        one.num_tried = TRIAL

    assert select_drafter(known, 0) == 1  # nobody has settled yet
    assert select_drafter(known, None) == 1
    known[0].num_tried += 1
    assert select_drafter(known, 0) == 0
    known[1].speed = LEAD + 0.01
    assert select_drafter(known, 0) == 1


def test_one_that_rested_has_another_trial_and_may_take_over() -> None:
    known, current, asked = drafters(2.0, 1.0), 0, []
    for step in range(4 * REST):
        if step == 2 * REST:
            known[1].speed = 5.0
        current = select_drafter(known, current)
        asked.append(current)

    assert 2 * TRIAL <= asked[: 2 * REST].count(1) <= 4 * TRIAL
    assert asked[-1] == 1
    assert asked[2 * REST :].count(1) > REST


def test_a_pause_ends_with_the_next_trial() -> None:
    known = drafters(2.0, 1.0)
    for one in known:
        one.num_tried = TRIAL
    known[1].num_left = 5000

    for _ in range(REST):
        select_drafter(known, 0)

    assert known[1].num_left == known[1].num_tried == 0


@pytest.mark.benchmarks
@pytest.mark.usefixtures("no_shape_checks")
def test_two_drafters_write_nearly_as_fast_as_the_better_one_alone() -> None:
    worse, better = run_contest([cpu(0.3)], 2000), run_contest([cpu(0.8)], 2000)

    both = run_contest([cpu(0.3), cpu(0.8)], 2000)

    assert both > 0.95 * better
    assert better > 1.2 * worse
