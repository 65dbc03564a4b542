"""What the numbers of a difference prove: rounding, a moved cut, or nothing."""

from dataclasses import replace

import pytest
import torch

from transformers_falcon_spec.evaluation.parity import (
    ReplayedStep,
    largest_difference,
    tie_checks,
)

INF = float("inf")


def step(token: int, *scores: float, logits: tuple[float, ...] = (3.0, 2.9, 0.0)) -> ReplayedStep:
    return ReplayedStep([5, token], torch.tensor(logits), torch.tensor(scores), torch.ones(3))


def holding(plain: ReplayedStep, drafted: ReplayedStep, transplanted: ReplayedStep | None = None) -> list[bool]:
    """Whether only logits differ, by no more than rounding explains, and the best two tokens are close."""
    return [check.holds for check in tie_checks(plain, drafted, transplanted or drafted, torch.float32)]


PLAIN = step(0, 3.0, 2.9, 0.0)


@pytest.mark.parametrize(
    ("drafted", "expected"),
    [
        (step(1, 3.0, 2.97, 0.0), [True, True, True]),  # 0.1 apart, and scores differ by 0.07
        (step(1, 3.0, 2.91, 0.0), [True, True, False]),
        (step(1, 3.0, float("nan"), 0.0), [True, True, False]),
        (step(1, 3.0, 2.97, 0.0, logits=(3.0, 2.0, 0.0)), [True, False, True]),
        (step(1, 3.0, 2.97, 0.0, logits=(3.0, float("nan"), 0.0)), [True, False, True]),
    ],
)
def test_each_check_reads_its_own_number(drafted: ReplayedStep, expected: list[bool]) -> None:
    assert holding(PLAIN, drafted) == expected


def test_another_token_from_the_trees_logits_is_no_tie() -> None:
    assert holding(PLAIN, step(1, 3.0, 2.97, 0.0), PLAIN) == [False, True, True]


def test_a_draw_that_cannot_be_rebuilt_proves_nothing() -> None:
    assert holding(replace(PLAIN, noise=None), step(1, 3.0, 2.97, 0.0)) == [True, True, False]


def test_a_cut_that_moved_explains_any_gap_only_where_it_concerns_the_two_tokens() -> None:
    assert holding(PLAIN, step(1, -INF, 2.9, 0.0)) == [True, True, True]
    assert holding(PLAIN, step(1, 3.0, 2.9, -INF)) == [True, True, False]


def test_equal_infinities_do_not_differ() -> None:
    left = torch.tensor([1.0, -INF, 2.0])

    assert largest_difference(left, torch.tensor([1.5, -INF, 2.0])) == 0.5
    assert largest_difference(left, torch.tensor([1.0, 0.0, 2.0])) == INF
