"""What is measured, most valuable first: cells, each of which holds ways to write the same texts, taken in turns.

A cell is complete when its turns are. The first way of a cell is the one that the others are compared with.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers_falcon_spec.evaluation.methods import DECODINGS
from transformers_falcon_spec.generation.timed import Options

EAGER, STATIC_CACHE = "plain, eager", "plain, `generate` with a static cache"  # which it compiles on CUDA
ROOT, RANDOM = "root alone", "untrained Falcon"  # drafters that never draft, and that are never right
ORACLES = {"oracle of 16 tokens": 16, "oracle of 4 tokens": 4}  # drafters that know the text, by tokens a step
ASSISTED, LOOKUP, DFLASH = "stock assisted", "stock prompt lookup", "stock DFlash"
STOCK = (EAGER, STATIC_CACHE, ASSISTED, LOOKUP, DFLASH)
EMBEDDED, FALCON5 = "embedded Falcon", "falcon5"
DRAFTERS = (EMBEDDED, FALCON5, "falcon3", "eagle1", "eagle3", "lookahead", "language model", "DiffuSpec", "EasySpec")

NARROW = "temperature-0.7-top-k-20-top-p-0.8-penalty-1.05"
OPTIONS: dict[str, Options] = {
    **DECODINGS,
    NARROW: {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
}
LARGE_VOCABULARY = 151936  # that of Qwen3
TURNS = {1: 12, 4: 6, 8: 4, 16: 3}  # by rows of a batch
LENGTHS = (1024, 4096, 16384, 65536)  # tokens of the prompt where a step's growth with the text is measured


@dataclass(frozen=True)
class Way:
    """One way to write text: a stock one, or a drafter of this package, captured or not."""

    who: str
    captures: bool | None = None  # None: stock
    compiles: bool = False
    decoding: str | None = None  # where it is not the cell's

    @property
    def name(self) -> str:
        """What results and tables call it."""
        parts = [
            "plain" if self.who == ROOT else self.who,
            {True: "captured", False: "uncaptured", None: None}[self.captures],
            "compiled" if self.compiles else None,
            self.decoding,
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
    vocab_size: int | None = None  # where it is not the shape's
    lengths: tuple[int, ...] = ()  # turn n has a prompt of `lengths[n % len(lengths)]` tokens, made of the prompts
    max_new_tokens: int | None = None  # where it is not the command's
    is_endless: bool = False  # no token ends the text
    compares_texts: bool = True
    num_calls: int = 0  # above 0: so many short calls of all kinds, whose memory is watched
    num_turns: int = 0  # 0: as many as `TURNS` says
    is_grid: bool = False  # one of many alike, which tables show side by side

    @property
    def planned(self) -> int:
        """Turns of the whole cell."""
        return self.num_turns or TURNS[self.rows]

    @property
    def setting(self) -> str:
        """What decides plain decoding's texts, besides the prompts."""
        return f"{self.shape}|{self.vocab_size}|{self.decoding}|{self.rows}|{self.max_new_tokens}|{self.is_endless}"

    def describe(self) -> dict[str, Any]:
        """The fields that readers need."""
        return {
            "name": self.name,
            "shape": self.shape,
            "decoding": self.decoding,
            "num_rows": self.rows,
            "planned": self.planned,
            "is_grid": self.is_grid,
        }


def three_ways(who: str) -> tuple[Way, ...]:
    """A drafter uncaptured, captured, and captured and compiled."""
    return (Way(who, captures=False), Way(who, captures=True), Way(who, captures=True, compiles=True))


def cells(shape: str = "7b", other: str = "1b") -> Iterator[Cell]:
    """All cells, most valuable first. `shape` is that of the goals, `other` a second one."""
    yield from _first(shape)
    yield from _goals(shape)
    for each in dict.fromkeys((shape, other)):
        for rows in (1, 4, 16):
            for decoding in ("greedy", "temperature-1", "temperature-0.7"):
                yield from _grid(each, decoding, rows)
    yield Cell(
        "DFlash, the small pair, greedy", "small", (PLAIN, Way(EAGER), Way(DFLASH), Way(EMBEDDED, captures=True))
    )


def cells_of(device_type: str, shape: str) -> list[Cell]:
    """All cells for a kind of device. On a CPU nothing is compiled, which would take minutes for each shape of a tree."""
    if device_type == "cuda":
        return [*cells(shape)]
    return [replace(cell, ways=tuple(dict.fromkeys(map(_eager, cell.ways)))) for cell in cells(shape, shape)]


def _eager(way: Way) -> Way:
    return replace(way, compiles=False)


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
    compiled = replace(captured, compiles=True)
    yield Cell(
        "large vocabulary",
        shape,
        (replace(compiled, decoding="temperature-1"), replace(compiled, decoding=NARROW)),
        vocab_size=LARGE_VOCABULARY,
        compares_texts=False,
    )
    yield Cell(
        "growth with the text",
        shape,
        (PLAIN, captured),
        lengths=LENGTHS,
        max_new_tokens=64,
        is_endless=True,
        compares_texts=False,
        num_turns=2 * len(LENGTHS),
    )
    yield Cell("many calls", "small", (), num_calls=2000, num_turns=1)


def _grid(shape: str, decoding: str, rows: int) -> Iterator[Cell]:
    """Every method beside captured plain decoding; stock assistants write one row."""
    where = f"{shape}, {decoding}, {rows} row{'s' * (rows > 1)}"
    stock = (Way(EAGER), *((Way(ASSISTED), Way(LOOKUP)) if rows == 1 else ()))
    for who, ways in {"stock": stock, **{who: three_ways(who) for who in DRAFTERS}}.items():
        yield Cell(f"{who}, {where}", shape, (PLAIN, *ways), decoding, rows, is_grid=True)
