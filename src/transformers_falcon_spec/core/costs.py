"""Seconds by size, learned from the timings of a noisy machine."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEARNING_RATE = 0.15  # how far a point follows a sample once it has seen some
OUTLIER = 2.5  # a sample this many times what is expected is left out ...
PATIENCE = 3  # ... unless so many in a row say the same
SAMPLES_TO_TRUST = 3  # before that nothing is called an outlier


class CostCurve:
    """Seconds that something of a size takes, learned sample by sample: straight lines between points, never falling.

    Sizes between two powers of 2 share a point, which stands at the mean of the sizes and seconds of its samples; old samples
    are forgotten. Beyond the last point the line rises as it did before, at the end or on the whole, whichever is steeper.

    Example:

    ```python
    >>> curve = CostCurve()
    >>> curve.learn(1, 0.010)
    >>> curve.learn(4, 0.016)
    >>> [round(float(seconds), 3) for seconds in curve([1, 2, 4, 5])]
    [0.01, 0.012, 0.016, 0.018]

    ```
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float, int]] = {}  # mean size, mean seconds and samples, by power of 2
        self.num_outliers = 0  # samples left out
        self._num_in_a_row = 0

    def __call__(self, sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds expected of each size; zeros while nothing is known."""
        if not self._points:
            return np.zeros(len(sizes))
        places, seconds = self._line()
        found = np.interp(sizes, places, seconds)
        if len(places) > 1:
            slope = max(_slope(places[-2:], seconds[-2:]), _slope(places[[0, -1]], seconds[[0, -1]]))
            found += np.maximum(np.asarray(sizes) - places[-1], 0) * slope
        return found

    def learn(self, size: int, seconds: float) -> None:
        """Take in one timing of a size, 1 or more."""
        bucket = size.bit_length()
        place, mean, num_seen = self._points.get(bucket, (float(size), seconds, 0))
        expected = float(self([size])[0])
        if num_seen >= SAMPLES_TO_TRUST and seconds > OUTLIER * expected and self._num_in_a_row < PATIENCE:
            self.num_outliers += 1
            self._num_in_a_row += 1
            return
        self._num_in_a_row = 0
        rate = max(1 / (num_seen + 1), LEARNING_RATE)
        self._points[bucket] = (place + rate * (size - place), mean + rate * (seconds - mean), num_seen + 1)

    def _line(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The points by size; those whose seconds would fall take their common mean (pool adjacent violators)."""
        places, seconds, num_seen = np.array([self._points[bucket] for bucket in sorted(self._points)]).T
        pools: list[list[float]] = []  # mean, weight, points
        for mean, weight in zip(seconds, np.minimum(num_seen, 1 / LEARNING_RATE), strict=True):
            pools.append([mean, weight, 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (mean_a, weight_a, num_a), (mean_b, weight_b, num_b) = pools.pop(-2), pools.pop()
                both = weight_a + weight_b
                pools.append([(mean_a * weight_a + mean_b * weight_b) / both, both, num_a + num_b])
        return places, np.repeat([pool[0] for pool in pools], [int(pool[2]) for pool in pools])

    def to_json(self) -> dict[str, float]:
        """Seconds by size, at the points."""
        places, seconds = self._line() if self._points else ((), ())
        return {f"{place:.0f}": float(cost) for place, cost in zip(places, seconds, strict=True)}


def _slope(places: NDArray[np.float64], seconds: NDArray[np.float64]) -> float:
    return float((seconds[1] - seconds[0]) / (places[1] - places[0]))
