"""Intervals of shares against published values."""

import pytest

from transformers_falcon_spec.evaluation.summary import wilson_interval


@pytest.mark.parametrize(
    ("num_hits", "num_trials", "expected"),
    [  # R. G. Newcombe, Statistics in Medicine 17 (1998), 857-872, table I, method 3
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_the_interval_of_a_share_is_the_published_one(
    num_hits: int, num_trials: int, expected: tuple[float, float]
) -> None:
    assert wilson_interval(num_hits, num_trials) == pytest.approx(expected, abs=5e-5)


def test_hits_and_misses_have_mirrored_intervals() -> None:
    low, high = wilson_interval(3, 50)

    assert wilson_interval(47, 50) == pytest.approx((1 - high, 1 - low))


def test_the_bounds_of_an_interval_have_the_share_on_the_edge_of_what_luck_allows() -> None:
    for bound in wilson_interval(8, 40, level=0.9):
        deviation = abs(8 / 40 - bound) / (bound * (1 - bound) / 40) ** 0.5
        assert deviation == pytest.approx(1.6448536)
