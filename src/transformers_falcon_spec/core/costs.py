"""Seconds by size, learned from the timings of a noisy machine."""

from bisect import bisect_right

LEARNING_RATE = 0.15  # how far a point follows a sample once it has seen some
OUTLIER = 2.5  # a sample this many times what is expected is left out ...
PATIENCE = 3  # ... unless so many in a row say the same
SAMPLES_TO_TRUST = 3  # before that nothing is called an outlier

Point = tuple[float, float]  # size and seconds


class CostCurve:
    """Seconds that something of a size takes, learned sample by sample: straight lines between points, never falling.

    Sizes between two powers of 2 share a point, which stands at the mean of the sizes and seconds of its samples; old samples
    are forgotten. Beyond the last point the line rises as it did before, at the end or on the whole, whichever is steeper.

    Example:

    ```python
    >>> curve = CostCurve()
    >>> curve.learn(1, 0.010)
    >>> curve.learn(4, 0.016)
    >>> [round(curve(size), 3) for size in (1, 2, 4, 5)]
    [0.01, 0.012, 0.016, 0.018]

    ```
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float, int]] = {}  # mean size, mean seconds and samples, by power of 2
        self._line: list[Point] = []
        self.num_outliers = 0  # samples left out
        self._num_in_a_row = 0

    def __call__(self, size: int) -> float:
        """Seconds expected of a size; 0 while nothing is known."""
        line = self._line
        if not line:
            return 0.0
        place = bisect_right(line, (size, float("inf")))
        if place == 0 or len(line) == 1:
            return line[0][1]
        if place < len(line):
            return _between(line[place - 1], line[place], size)
        (first, least), (last, most) = line[0], line[-1]
        return max(_between(line[-2], line[-1], size), most + (most - least) / (last - first) * (size - last))

    def learn(self, size: int, seconds: float) -> None:
        """Take in one timing of a size, 1 or more."""
        bucket = size.bit_length()
        place, mean, num_seen = self._seen.get(bucket, (float(size), seconds, 0))
        is_odd = num_seen >= SAMPLES_TO_TRUST and seconds > OUTLIER * self(size)
        if is_odd and self._num_in_a_row < PATIENCE:
            self.num_outliers += 1
            self._num_in_a_row += 1
            return
        self._num_in_a_row = 0
        rate = max(1 / (num_seen + 1), LEARNING_RATE)
        self._seen[bucket] = (place + rate * (size - place), mean + rate * (seconds - mean), num_seen + 1)
        self._line = self._rising()

    def _rising(self) -> list[Point]:
        """The points by size; those whose seconds would fall take their common mean (pool adjacent violators)."""
        pools: list[tuple[float, float, list[float]]] = []  # mean seconds, weight, sizes
        for _bucket, (size, seconds, num_seen) in sorted(self._seen.items()):
            pools.append((seconds, min(num_seen, 1 / LEARNING_RATE), [size]))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (mean_a, weight_a, sizes_a), (mean_b, weight_b, sizes_b) = pools[-2:]
                both = weight_a + weight_b
                pools[-2:] = [((mean_a * weight_a + mean_b * weight_b) / both, both, sizes_a + sizes_b)]
        return [(size, mean) for mean, _weight, sizes in pools for size in sizes]

    def to_json(self) -> dict[str, float]:
        """Seconds by size, at the points."""
        return {f"{size:.0f}": seconds for size, seconds in self._line}


def _between(left: Point, right: Point, size: int) -> float:
    return left[1] + (right[1] - left[1]) * (size - left[0]) / (right[0] - left[0])
