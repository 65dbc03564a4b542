"""What the turns of a cell come to: rates and ratios with intervals, phases of a step, and its distance from the memory floor."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from transformers_falcon_spec.evaluation.summary import bootstrap, pooled_tokens_per_second

from .cells import Cell, Way
from .phases import PHASES

Record = dict[str, Any]
Row = dict[str, Any]


def cell_result(cell: Cell, records: Sequence[Record], failures: dict[str, str]) -> dict[str, Any]:
    """The entry of a cell in the results file."""
    own = [record for record in records if record["cell"] == cell.name and "turn" in record]
    by_way = {way.name: {record["turn"]: record for record in own if record["way"] == way.name} for way in cell.ways}
    base = by_way[cell.ways[0].name]
    rows = [row_of(way, by_way[way.name], base, cell) for way in cell.ways if by_way[way.name]]
    return {
        **cell.describe(),
        "num_turns": len({record["turn"] for record in own}),
        "rows": rows,
        "failures": failures,
    }


def row_of(way: Way, runs: dict[int, Record], base: dict[int, Record], cell: Cell) -> Row:
    """One way of a cell, and its speed beside the first way of the cell in the same turns."""
    own = [*runs.values()]
    pairs = [(run, base[turn]) for turn, run in runs.items() if turn in base]
    num_steps, num_row_steps = (sum(run[key] for run in own) for key in ("num_steps", "num_row_steps"))
    step_seconds = per_step(own, "decode_seconds")
    phases, floor = phases_of(own), floor_seconds(own)
    busy = sum(phases.values()) if phases else None
    return {
        "way": way.name,
        "who": way.who,
        "captures": way.captures,
        "num_turns": len(own),
        "is_complete": len(own) >= cell.planned,
        "is_captured": all(run["is_captured"] for run in own),
        "fell_back": way.captures is True and not all(run["is_captured"] and not run.get("uncaptured") for run in own),
        "num_steps": num_steps,
        "tokens_per_second": pooled_tokens_per_second(own),
        "tokens_per_second_interval": bootstrap(own, pooled_tokens_per_second, 0),
        "ratio": ratio(pairs) if pairs else None,
        "ratio_interval": bootstrap(pairs, ratio, 0) if pairs else None,
        "acceptance_length": 1 + sum(run["num_accepted"] for run in own) / max(num_row_steps, 1),
        "step_seconds": step_seconds,
        "phases": phases,
        "phases_by": own[0].get("phases_by"),
        "step_over_phases": step_seconds / busy if busy else None,
        "waiting_share": 1 - busy / step_seconds if busy else None,
        "floor_seconds": floor,
        "step_over_floor": step_seconds / floor if floor else None,
        "peak_bytes": max((run["peak_bytes"] for run in own if run["peak_bytes"] is not None), default=None),
        **{key: captured(own, key) for key in ("capture_seconds", "num_captures")},
        "verdicts": verdicts_of(own),
        "notes": sorted({note for run in own for note in run["notes"]}),
    }


def ratio(pairs: Sequence[tuple[Record, Record]]) -> float:
    """How many times as many tokens a second the first of each pair writes."""
    return pooled_tokens_per_second([run for run, _ in pairs]) / pooled_tokens_per_second(
        [other for _, other in pairs]
    )


def per_step(runs: Iterable[Record], key: str) -> float:
    """Seconds of a step."""
    runs = list(runs)
    return sum(run[key] for run in runs) / max(sum(run["num_steps"] for run in runs), 1)


def phases_of(runs: Sequence[Record]) -> dict[str, float]:
    """Seconds of a step by phase; empty for stock methods, whose phases nobody times."""
    names = dict.fromkeys(name for run in runs for name in run.get("phases", {}))
    order = sorted(names, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
    num_steps = max(sum(run["num_steps"] for run in runs), 1)
    return {name: sum(run["phases"].get(name, 0.0) for run in runs) / num_steps for name in order}


def captured(runs: Sequence[Record], key: str) -> float:
    """What captures came to: those of the warm-up, and those of turns that needed further graphs."""
    return max(run[f"warm_up_{key}"] for run in runs) + sum(run[key] for run in runs)


def floor_seconds(runs: Sequence[Record]) -> float | None:
    """The least seconds of a step, by the bytes that it reads and the bandwidth measured beside it."""
    if any(run["floor_bytes"] is None for run in runs):
        return None
    return fmean(run["floor_bytes"] / run["bandwidth"] for run in runs)


def verdicts_of(runs: Sequence[Record]) -> dict[str, int] | None:
    """How many texts are plain decoding's, and what the others are; None where nothing was compared."""
    compared = [run["verdicts"] for run in runs if run.get("verdicts")]
    return {name: sum(each[name] for each in compared) for name in compared[0]} if compared else None
