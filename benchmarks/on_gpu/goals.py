"""What the captured step must show on a GPU, as code that checks itself: a goal is met, missed or not measured.

Only complete cells that ran on CUDA count. Numbers are those of `rows.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.report import total, where

from .cells import EMBEDDED, FALCON5, PLAIN_COMPILED, RANDOM, Way
from .rows import Row

SHAPE = "7b"  # of the goals
MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
Measure = Callable[["Results"], "Found"]


@dataclass(frozen=True)
class Found:
    """A number and its interval, or None where it was not measured."""

    value: float | None = None
    interval: Sequence[float] | None = None


@dataclass(frozen=True)
class Goal:
    """A number that must be at least, or at most, `limit`."""

    what: str
    limit: float
    measure: Measure
    is_at_most: bool = False

    def check(self, results: "Results") -> dict[str, Any]:
        """The entry of the goal in the results file; without a device nothing counts as measured."""
        found = self.measure(results) if results.on_cuda else Found()
        goal = f"at {'most' if self.is_at_most else 'least'} {self.limit:g}"
        state = NOT_MEASURED
        if found.value is not None:
            is_met = found.value <= self.limit if self.is_at_most else found.value >= self.limit
            state = MET if is_met else MISSED

        return {"what": self.what, "goal": goal, "measured": found.value, "interval": found.interval, "state": state}


class Results:
    """The complete rows of all cells, by cell and way."""

    def __init__(self, cells: Sequence[dict[str, Any]], *, on_cuda: bool) -> None:
        self.cells, self.on_cuda = cells, on_cuda

    def row(self, cell: str, way: Way) -> Row | None:
        """The row of a way, if the cell is complete, of the shape of the goals, and took the steps that it asked for."""
        for each in where(self.cells, name=cell, shape=SHAPE):
            for row in where(each["rows"], way=way.name):
                is_sound = row["is_complete"] and not row["fell_back"]
                return row if is_sound else None

        return None

    def captured_rows(self, num_rows: Sequence[int] = (1, 4, 8, 16), shape: str | None = None) -> list[Row]:
        """All complete rows of ways whose steps were captured, of batches of these sizes."""
        found = []
        for cell in self.cells:
            if cell["num_rows"] in num_rows and shape in (None, cell["shape"]):
                found += where(cell["rows"], is_complete=True, is_captured=True)

        return found


def _number(cell: str, way: Way, key: str) -> Measure:
    """A number of one row."""

    def measure(results: Results) -> Found:
        row = results.row(cell, way)
        return Found() if row is None else Found(row[key], row.get(f"{key}_interval"))

    return measure


def _fastest(results: Results) -> Found:
    """The most tokens a second of one row of text."""
    best = max(results.captured_rows((1,), SHAPE), key=lambda row: row["tokens_per_second"], default=None)
    return Found() if best is None else Found(best["tokens_per_second"], best["tokens_per_second_interval"])


def _worst_step(results: Results) -> Found:
    """The step that takes longest beside its phases by device events, of all captured ways of the first cells."""
    values = []
    for name, is_compiled in product(("first, greedy", "first, temperature-1"), (False, True)):
        row = results.row(name, Way(EMBEDDED, captures=True, compiles=is_compiled))
        if row is None or not row["step_over_phases"]:
            return Found()
        values.append(row["step_over_phases"])

    return Found(max(values))


def _faults(results: Results) -> Found:
    """Texts of captured steps that differ from plain decoding's without a near tie."""
    compared = [row["verdicts"] for row in results.captured_rows() if row["verdicts"]]
    return Found(float(total(compared, "different"))) if compared else Found()


def _beside(what: str, cell: str, way: Way, limit: float) -> Goal:
    return Goal(what, limit, _number(cell, way, "ratio"))


_COMPILED = {who: Way(who, captures=True, compiles=True) for who in (EMBEDDED, FALCON5)}
ORACLE = Way("oracle of 16 tokens", captures=True)
_PLAIN_FLOOR = _number("first, greedy", PLAIN_COMPILED, "step_over_floor")
GOALS = (
    _beside(
        "embedded Falcon beside captured, compiled plain decoding, T = 0", "first, greedy", _COMPILED[EMBEDDED], 2.4
    ),
    _beside(
        "embedded Falcon beside captured, compiled plain decoding, T = 1",
        "first, temperature-1",
        _COMPILED[EMBEDDED],
        2.2,
    ),
    _beside("`falcon5` beside captured, compiled plain decoding, T = 0", "falcon5, greedy", _COMPILED[FALCON5], 2.6),
    _beside(
        "`falcon5` beside captured, compiled plain decoding, T = 1", "falcon5, temperature-1", _COMPILED[FALCON5], 2.2
    ),
    _beside("an oracle of 16 tokens a step beside captured plain decoding", "oracle", ORACLE, 10),
    Goal("a step over its phases by device events", 1.05, _worst_step, is_at_most=True),
    Goal(
        "a compiled step over the memory floor",
        1.8,
        _number("first, greedy", _COMPILED[EMBEDDED], "step_over_floor"),
        is_at_most=True,
    ),
    Goal("a compiled plain step over the memory floor", 1.5, _PLAIN_FLOOR, is_at_most=True),
    _beside("8 rows, embedded Falcon beside captured plain decoding", "batch 8", Way(EMBEDDED, captures=True), 1.8),
    Goal("tokens a second at the shape of 7B, one row", 400, _fastest),
    _beside("a drafter that is never right, 1,024 tokens", "random drafter", Way(RANDOM, captures=True), 0.97),
    Goal("texts of captured steps that differ without a near tie", 0, _faults, is_at_most=True),
)


def check_goals(cells: Sequence[dict[str, Any]], *, on_cuda: bool) -> list[dict[str, Any]]:
    """Every goal, what was measured, and whether it is met."""
    results = Results(cells, on_cuda=on_cuda)
    return [goal.check(results) for goal in GOALS]
