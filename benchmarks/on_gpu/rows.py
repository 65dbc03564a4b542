"""What the turns of a cell come to: rates and ratios with intervals, phases of a step, and its distance from the memory floor."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.report import total, where
from transformers_falcon_spec.evaluation.summary import bootstrap, pooled_tokens_per_second

from .cells import Cell, Way
from .phases import PHASES

Record = dict[str, Any]
Row = dict[str, Any]


def cell_result(cell: Cell, records: Sequence[Record], failures: dict[str, str]) -> dict[str, Any]:
    """The entry of a cell in the results file."""
    by_way: dict[str, dict[int, Record]] = {way.name: {} for way in cell.ways}
    turns = set()
    for record in where(records, cell=cell.name):
        if "turn" in record:
            turns.add(record["turn"])
            by_way.setdefault(record["way"], {})[record["turn"]] = record

    base = by_way[cell.ways[0].name]
    rows = []
    for way in cell.ways:
        if by_way[way.name]:
            rows.append(row_of(way, by_way[way.name], base, cell))

    return {**cell.describe(), "num_turns": len(turns), "rows": rows, "failures": failures}


def row_of(way: Way, runs: dict[int, Record], base: dict[int, Record], cell: Cell) -> Row:
    """One way of a cell, and its speed beside the first way of the cell in the same turns."""
    own = [*runs.values()]
    row: Row = {
        "way": way.name,
        "who": way.who,
        "captures": way.captures,
        "num_turns": len(own),
        "is_complete": len(own) >= cell.planned,
    }
    return row | capturing_of(way, own) | speed_of(runs, base) | steps_of(own) | {"verdicts": verdicts_of(own)}


def capturing_of(way: Way, runs: Sequence[Record]) -> Row:
    """Whether steps were captured, what captures came to, and what calls noted."""
    is_captured = all(run["is_captured"] for run in runs)
    has_uncaptured = any(run.get("uncaptured") for run in runs)
    notes = set()
    for run in runs:
        notes |= {*run["notes"]}

    row: Row = {
        "is_captured": is_captured,
        "fell_back": way.captures is True and (not is_captured or has_uncaptured),
        "notes": sorted(notes),
    }
    for key in ("capture_seconds", "num_captures"):
        in_warm_up = max(run[f"warm_up_{key}"] for run in runs)
        row[key] = in_warm_up + total(runs, key)  # of turns that needed further graphs

    return row


def speed_of(runs: dict[int, Record], base: dict[int, Record]) -> Row:
    """Tokens a second, and how many times as many as those of other runs in the same turns; with intervals."""
    own = [*runs.values()]
    pairs = [(run, base[turn]) for turn, run in runs.items() if turn in base]
    return {
        "tokens_per_second": pooled_tokens_per_second(own),
        "tokens_per_second_interval": bootstrap(own, pooled_tokens_per_second, 0),
        "ratio": ratio(pairs) if pairs else None,
        "ratio_interval": bootstrap(pairs, ratio, 0) if pairs else None,
    }


def steps_of(runs: Sequence[Record]) -> Row:
    """What a step took and kept, its phases, and its distance from the memory floor."""
    step_seconds = total(runs, "decode_seconds") / max(total(runs, "num_steps"), 1)
    phases = phases_of(runs)
    busy = sum(phases.values()) if phases else None
    floor = floor_seconds(runs)
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]

    return {
        "num_steps": total(runs, "num_steps"),
        "acceptance_length": 1 + total(runs, "num_accepted") / max(total(runs, "num_row_steps"), 1),
        "step_seconds": step_seconds,
        "phases": phases,
        "phases_by": runs[0].get("phases_by"),
        "step_over_phases": step_seconds / busy if busy else None,
        "waiting_share": 1 - busy / step_seconds if busy else None,
        "floor_seconds": floor,
        "step_over_floor": step_seconds / floor if floor else None,
        "peak_bytes": max(peaks, default=None),
    }


def ratio(pairs: Sequence[tuple[Record, Record]]) -> float:
    """How many times as many tokens a second the first of each pair writes."""
    own, others = zip(*pairs, strict=True)
    return pooled_tokens_per_second(own) / pooled_tokens_per_second(others)


def phases_of(runs: Sequence[Record]) -> dict[str, float]:
    """Seconds of a step by phase; empty for stock methods, whose phases nobody times."""
    seconds: Counter[str] = Counter()
    for run in runs:
        seconds.update(run.get("phases", {}))

    num_steps = max(total(runs, "num_steps"), 1)
    order = [name for name in PHASES if name in seconds]
    order += [name for name in seconds if name not in PHASES]
    return {name: seconds[name] / num_steps for name in order}


def floor_seconds(runs: Sequence[Record]) -> float | None:
    """The least seconds of a step, by the bytes that it reads and the bandwidth measured beside it."""
    if any(run["floor_bytes"] is None for run in runs):
        return None
    return fmean(run["floor_bytes"] / run["bandwidth"] for run in runs)


def verdicts_of(runs: Sequence[Record]) -> dict[str, int] | None:
    """How many texts are plain decoding's, and what the others are; None where nothing was compared."""
    counts: Counter[str] | None = None
    for run in runs:
        if run.get("verdicts"):
            counts = counts or Counter(dict.fromkeys(run["verdicts"], 0))
            counts.update(run["verdicts"])

    return None if counts is None else dict(counts)
