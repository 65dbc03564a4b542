"""Curves of seconds by size: found again from noisy samples, never falling, deaf to outliers but not to change."""

import numpy as np
import pytest

from transformers_falcon_spec.core.costs import OUTLIER, PATIENCE, CostCurve

SIZES = np.array([1, 3, 6, 12, 24, 48, 100])


def seconds_of(sizes: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """A forward that costs much at once and little for each node, then more."""
    return scale * (0.007 + 0.0002 * sizes + 0.0003 * np.maximum(sizes - 30, 0))


def seconds(curve: CostCurve, *sizes: int) -> list[float]:
    return [curve(int(size)) for size in sizes]


def trained(
    num_samples: int, noise: float, seed: int = 0, curve: CostCurve | None = None, scale: float = 1.0
) -> CostCurve:
    random, curve = np.random.default_rng(seed), curve or CostCurve()
    for size in random.choice(SIZES, num_samples):
        curve.learn(int(size), float(seconds_of(size, scale) * random.uniform(1 - noise, 1 + noise)))
    return curve


def test_nothing_is_known_before_the_first_sample_and_then_every_size_costs_as_much() -> None:
    curve = CostCurve()
    assert seconds(curve, 1, 5) == [0.0, 0.0]

    curve.learn(3, 0.5)

    assert seconds(curve, 1, 3, 99) == [0.5, 0.5, 0.5]
    assert curve.to_json() == {"3": 0.5}


def test_it_goes_through_exact_samples_and_on_as_it_rose() -> None:
    curve = CostCurve()
    for size, cost in ((1, 1.0), (4, 4.0), (16, 10.0)):
        curve.learn(size, cost)

    assert seconds(curve, 1, 2, 4, 10, 16) == [1.0, 2.0, 4.0, 7.0, 10.0]
    assert seconds(curve, 26) == [10.0 + 10 * 9 / 15]  # on the whole it rose faster than at the end


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_curve_is_found_again_from_samples(noise: float) -> None:
    found = seconds(trained(400, noise), *SIZES)

    np.testing.assert_allclose(found, seconds_of(SIZES), rtol=1e-9 if noise == 0 else 0.15)


def test_it_never_falls_whatever_the_samples_say() -> None:
    random, curve = np.random.default_rng(1), CostCurve()
    for _ in range(200):
        curve.learn(int(random.integers(1, 300)), float(random.uniform(0.1, 1.0)))

        assert (np.diff(seconds(curve, *range(1, 400))) >= 0).all()


def test_falling_points_take_their_mean() -> None:
    curve = CostCurve()
    for size, cost in ((1, 1.0), (2, 5.0), (4, 3.0), (8, 9.0)):
        curve.learn(size, cost)

    assert seconds(curve, 1, 2, 4, 8) == pytest.approx([1.0, 4.0, 4.0, 9.0], rel=0.01)  # the newer one weighs more


def test_outliers_are_left_out_and_counted() -> None:
    curve = trained(100, 0.1)
    before = curve(6)

    curve.learn(6, before * OUTLIER * 4)

    assert curve(6) == before
    assert curve.num_outliers == 1


def test_a_machine_that_became_slower_is_believed_after_a_while() -> None:
    curve = trained(100, 0.1)
    assert curve.num_outliers == 0

    trained(400, 0.1, seed=3, curve=curve, scale=4.0)

    np.testing.assert_allclose(seconds(curve, *SIZES), seconds_of(SIZES, 4.0), rtol=0.15)
    assert curve.num_outliers >= PATIENCE


def test_sizes_seen_long_ago_follow_the_pace_of_those_seen_now() -> None:
    curve = trained(100, 0.1)
    for _ in range(60):
        curve.learn(6, 1.5 * float(seconds_of(np.array(6))))

    np.testing.assert_allclose(seconds(curve, *SIZES), seconds_of(SIZES, 1.5), rtol=0.15)


def test_the_first_sample_of_a_size_may_be_a_cold_one() -> None:
    curve = CostCurve()
    for cost in (0.9, 0.5, 0.8):
        curve.learn(2, cost)

    assert curve(2) == pytest.approx((0.5 + 0.5 + 0.8) / 3, rel=0.01)


def test_a_stale_point_gives_way_to_a_fresh_one() -> None:
    curve = CostCurve()
    for size, cost in ((4, 9.0), *[(1, 1.0), (16, 4.0)] * 40):
        curve.learn(size, cost)

    assert curve.to_json() == {"1": 1.0, "16": 4.0}
    assert curve(4) == pytest.approx(1.6)  # nobody knows, so that it is worth a try


def test_a_clock_too_coarse_to_see_something_is_no_fault() -> None:
    curve = CostCurve()
    for cost in (0.0, 0.0, 0.0, 0.0, 0.0, 1.0):
        curve.learn(1, cost)

    assert 0.0 <= curve(1) < 1.0
