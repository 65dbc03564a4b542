"""What the numbers of a difference prove: rounding, a moved cut, or nothing."""

from dataclasses import replace

import pytest
import torch

from transformers_falcon_spec.evaluation.parity import (
    Float32Comparison,
    ReplayedStep,
    StepComparison,
    compare_steps,
    largest_difference,
)

INF = float("inf")
TIE = StepComparison(gap=0.1, rounding=0.05, logits_difference=0.05, limit=1.0, is_caused_by_logits=True, is_cut=False)


def holding(comparison: StepComparison) -> list[bool]:
    return [check.holds for check in comparison.checks()]


def step(token: int, *scores: float, logits: tuple[float, ...] = (3.0, 2.9, 0.0)) -> ReplayedStep:
    return ReplayedStep([5, token], torch.tensor(logits), torch.tensor(scores), torch.ones(3))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [True, True, True]),
        ({"gap": 0.2}, [True, True, True]),
        ({"gap": 0.21}, [True, True, False]),
        ({"gap": None}, [True, True, False]),
        ({"rounding": None}, [True, True, False]),
        ({"logits_difference": 1.01}, [True, False, True]),
        ({"logits_difference": None}, [True, False, True]),
        ({"is_caused_by_logits": False}, [False, True, True]),
        ({"gap": 50.0, "is_cut": True}, [True, True, True]),
    ],
)
def test_each_check_reads_its_own_number(change: dict[str, object], expected: list[bool]) -> None:
    assert holding(replace(TIE, **change)) == expected


@pytest.mark.parametrize(
    ("plain_error", "tree_error", "expected"),
    [
        (0.1, 0.4, True),
        (0.1, 0.41, False),
        (0.0, 0.2, True),
        (0.0, 0.21, False),
        (None, 0.1, False),
        (0.1, None, False),
    ],
)
def test_the_tree_may_err_four_times_as_much_as_plain_decoding_or_the_last_digit(
    plain_error: float | None, tree_error: float | None, expected: bool
) -> None:
    reading = Float32Comparison(7, 0.01, plain_error, tree_error, unit=0.05)

    assert holding(replace(TIE, float32=reading)) == [True, True, True, expected]


def test_a_cut_that_moved_is_seen_only_where_it_concerns_the_two_tokens() -> None:
    whole, cut = step(0, 3.0, 2.9, 0.0), step(1, -INF, 2.9, 0.0)
    other = step(1, 3.0, 2.9, -INF)

    concerned, unconcerned = (compare_steps(whole, drafted, drafted, torch.float32, None) for drafted in (cut, other))

    assert (concerned.is_cut, unconcerned.is_cut) == (True, False)
    assert concerned.rounding == unconcerned.rounding == 0.0


def test_logits_that_are_no_numbers_prove_nothing() -> None:
    plain, drafted = step(0, 3.0, 2.9, 0.0), step(1, 3.0, 2.9, 0.0, logits=(3.0, float("nan"), 0.0))

    comparison = compare_steps(plain, drafted, drafted, torch.float32, None)

    assert comparison.logits_difference is None
    assert not all(holding(comparison))


def test_equal_infinities_do_not_differ() -> None:
    left = torch.tensor([1.0, -INF, 2.0])

    assert largest_difference(left, torch.tensor([1.5, -INF, 2.0])) == 0.5
    assert largest_difference(left, torch.tensor([1.0, 0.0, 2.0])) is None
