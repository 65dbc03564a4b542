"""What is measured, most valuable first: cells, each of which holds ways to write the same texts, taken in turns.

A cell is complete when its turns are. The first way of a cell is the one that the others are compared with.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

EAGER, STATIC_CACHE = "plain, eager", "plain, `generate` with a static cache"  # which it compiles on CUDA
ROOT, RANDOM = "root alone", "untrained Falcon"  # drafters that never draft, and that are never right
ORACLES = {"oracle of 16 tokens": 16, "oracle of 4 tokens": 4}  # drafters that know the text, by tokens a step
STOCK = (EAGER, STATIC_CACHE)
EMBEDDED, FALCON5 = "embedded Falcon", "falcon5"

TURNS = {1: 12, 8: 4}  # by rows of a batch


@dataclass(frozen=True)
class Way:
    """One way to write text: a stock one, or a drafter of this package, captured or not."""

    who: str
    captures: bool | None = None  # None: stock
    compiles: bool = False

    @property
    def name(self) -> str:
        """What results and tables call it."""
        parts = [
            "plain" if self.who == ROOT else self.who,
            {True: "captured", False: "uncaptured", None: None}[self.captures],
            "compiled" if self.compiles else None,
        ]
        return ", ".join(part for part in parts if part)

    @property
    def is_stock(self) -> bool:
        """Whether no code of this package takes part."""
        return self.who in STOCK


PLAIN, PLAIN_COMPILED = Way(ROOT, captures=True), Way(ROOT, captures=True, compiles=True)


@dataclass(frozen=True)
class Cell:
    """Ways that write the same texts at one shape, decoding and number of rows."""

    name: str
    shape: str  # of `benchmarks.inflation.SHAPES`, or `small`: the pair as it is
    ways: tuple[Way, ...]
    decoding: str = "greedy"
    rows: int = 1
    max_new_tokens: int | None = None  # where it is not the command's
    is_endless: bool = False  # no token ends the text
    num_turns: int = 0  # 0: as many as `TURNS` says

    @property
    def planned(self) -> int:
        """Turns of the whole cell."""
        return self.num_turns or TURNS[self.rows]

    @property
    def setting(self) -> str:
        """What decides plain decoding's texts, besides the prompts."""
        return f"{self.shape}|{self.decoding}|{self.rows}|{self.max_new_tokens}|{self.is_endless}"

    def describe(self) -> dict[str, Any]:
        """The fields that readers need."""
        return {
            "name": self.name,
            "shape": self.shape,
            "decoding": self.decoding,
            "num_rows": self.rows,
            "planned": self.planned,
        }


def three_ways(who: str) -> tuple[Way, ...]:
    """A drafter uncaptured, captured, and captured and compiled."""
    return (Way(who, captures=False), Way(who, captures=True), Way(who, captures=True, compiles=True))


def cells(shape: str = "7b") -> Iterator[Cell]:
    """All cells, most valuable first; `shape` is that of the goals."""
    yield from _first(shape)
    yield from _goals(shape)


def cells_of(device_type: str, shape: str) -> list[Cell]:
    """All cells for a kind of device. On a CPU nothing is compiled, which would take minutes for each shape of a tree."""
    found = list(cells(shape))
    if device_type == "cuda":
        return found

    uncompiled = []
    for cell in found:
        ways = dict.fromkeys(replace(way, compiles=False) for way in cell.ways)
        uncompiled.append(replace(cell, ways=tuple(ways)))

    return uncompiled


def _first(shape: str) -> Iterator[Cell]:
    """The plains and Falcon, three ways each, and what the machine gives whoever drafts."""
    plains = (PLAIN_COMPILED, PLAIN, Way(EAGER), Way(STATIC_CACHE))
    for decoding in ("greedy", "temperature-1"):
        yield Cell(f"first, {decoding}", shape, (*plains, *three_ways(EMBEDDED)), decoding)
    yield Cell("oracle", shape, (PLAIN, *(Way(who, captures=True) for who in ORACLES)))
    for decoding in ("greedy", "temperature-1"):
        yield Cell(f"falcon5, {decoding}", shape, (PLAIN_COMPILED, *three_ways(FALCON5)), decoding)


def _goals(shape: str) -> Iterator[Cell]:
    """What single goals need."""
    captured = Way(EMBEDDED, captures=True)
    yield Cell("batch 8", shape, (PLAIN, captured), rows=8)
    yield Cell(
        "random drafter", shape, (PLAIN, Way(RANDOM, captures=True)), max_new_tokens=1024, is_endless=True, num_turns=3
    )
