"""A curve of seconds by size, fitted to timings of a noisy machine while they come in."""

from bisect import bisect_right
from dataclasses import dataclass

PACE_RATE = 0.2  # how far the pace follows a sample
MEMORY = 0.97  # factor of all weights at each new sample
OUTLIER = 2.5  # a sample this many times what is expected is left out ...
PATIENCE = 3  # ... unless so many came in a row
STALE = 0.25  # a point with less than this share of a neighbour's weight gives way to it
WEIGHT_TO_TRUST = 2.5  # with less weight nothing is called an outlier, nor does the pace follow

Point = tuple[float, float]  # size and seconds
_Pool = tuple[float, float, list[float]]  # seconds, weight and sizes


@dataclass
class _Samples:
    """The timings of all sizes between two powers of 2, as running means."""

    size: float  # mean
    seconds: float  # mean, at the pace of 1
    weight: float = 0.0  # when the newest one came
    num: int = 0
    newest: int = 0  # how many of all sizes had come by then

    def weight_at(self, num_samples: int) -> float:
        """The weight after so many samples of all sizes."""
        return self.weight * MEMORY ** (num_samples - self.newest)

    def learn(self, size: int, seconds: float, num_samples: int) -> None:
        """Add one sample; of the first two the lower one counts, for the first may be cold."""
        weight = self.weight_at(num_samples)
        rate = 1 / (max(weight, 1.0) + 1) if self.num else 1.0
        self.size += rate * (size - self.size)
        self.seconds = min(self.seconds, seconds) if self.num == 1 else self.seconds + rate * (seconds - self.seconds)
        self.weight = weight + 1
        self.num += 1
        self.newest = num_samples


class CostCurve:
    """The seconds that work of a size takes, learned sample by sample: straight lines between points, never falling.

    Sizes between two powers of 2 share a point, at the mean of its samples; old samples are forgotten. Beyond the last
    point the line rises as at its end or as on the whole, whichever is steeper. A machine that slows down, or a text
    that grows, makes all sizes dearer by the same factor, the pace.
    """

    def __init__(self) -> None:
        self._samples: dict[int, _Samples] = {}  # by power of 2
        self._line: list[Point] = []
        self._pace = 1.0  # present seconds over those on the line
        self._num_samples = 0
        self._num_in_a_row = 0
        self.num_outliers = 0  # samples left out

    def __call__(self, size: int) -> float:
        """The expected seconds of a size; 0 before the first timing."""
        line = self._line
        if not line:
            return 0.0

        index = bisect_right(line, (size, float("inf")))
        if index == 0 or len(line) == 1:
            seconds = line[0][1]
        elif index < len(line):
            seconds = _between(line[index - 1], line[index], size)
        else:
            first, least = line[0]
            last, most = line[-1]
            on_the_whole = most + (most - least) / (last - first) * (size - last)
            seconds = max(_between(line[-2], line[-1], size), on_the_whole)

        return self._pace * seconds

    @property
    def largest(self) -> float:
        """The largest size that the line says something about; 0 before the first timing."""
        return self._line[-1][0] if self._line else 0.0

    def learn(self, size: int, seconds: float) -> None:
        """Add one timing of a size, 1 or more."""
        samples = self._samples.setdefault(size.bit_length(), _Samples(float(size), seconds))
        is_known = samples.weight_at(self._num_samples) > WEIGHT_TO_TRUST
        if is_known and seconds > OUTLIER * self(size) and self._num_in_a_row < PATIENCE:
            self.num_outliers += 1
            self._num_in_a_row += 1
            return

        self._num_in_a_row = 0
        self._num_samples += 1
        if is_known and samples.seconds:  # 0 by a coarse clock
            self._pace += PACE_RATE * (seconds / samples.seconds - self._pace)

        samples.learn(size, seconds / self._pace, self._num_samples)
        self._line = self._rising()

    def _rising(self) -> list[Point]:
        """The points by size; where seconds would fall, neighbours are pooled (pool adjacent violators)."""
        pools: list[_Pool] = []
        for _power, samples in sorted(self._samples.items()):
            pools.append((samples.seconds, samples.weight_at(self._num_samples), [samples.size]))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                pools[-2:] = [_pooled(*pools[-2:])]

        return [(size, mean) for mean, _weight, sizes in pools for size in sizes]

    def to_json(self) -> dict[str, float]:
        """Seconds by size, at the points."""
        return {f"{size:.0f}": self._pace * seconds for size, seconds in self._line}


def _between(left: Point, right: Point, size: int) -> float:
    return left[1] + (right[1] - left[1]) * (size - left[0]) / (right[0] - left[0])


def _pooled(left: _Pool, right: _Pool) -> _Pool:
    """One point for two neighbours: their mean, or the fresh one if the other is stale: its size is tried again."""
    mean_a, weight_a, sizes_a = left
    mean_b, weight_b, sizes_b = right
    if min(weight_a, weight_b) < STALE * max(weight_a, weight_b):
        return left if weight_a >= weight_b else right

    both = weight_a + weight_b
    return ((mean_a * weight_a + mean_b * weight_b) / both, both, sizes_a + sizes_b)
