"""The tables of `docs/gpu.md`: the goals first, then every cell that has turns."""

from collections.abc import Iterator
from typing import Any

from benchmarks.report import Result, source_line, table

from .cells import ROOT
from .goals import MET, NOT_MEASURED

SHOWN = {
    "way": "{shown}",
    "tokens/s (95 % interval)": "{tokens_per_second:.1f} ({tokens_per_second_interval:~.1f})",
    "times the first line": "{ratio:.2f} ({ratio_interval:~.2f})",
    "tokens a step": "{acceptance_length:.2f}",
    "ms a step": "{step_seconds:1000*.2f}",
    "of it draft, read, accept": "{draft_ms} / {read_ms} / {accept_ms}",
    "floor": "{floor_seconds:1000*.2f}",
    "texts": "{texts}",
}
TIMELESS = ("way", "tokens a step", "texts")
ON_CUDA = {
    "device waits": "{waiting_share:.0%}",
    "peak memory, GiB": "{peak_bytes:GiB}",
    "graphs made in": "{capture_seconds:.1f} s",
}


def tables(result: Result, path: str) -> Iterator[str]:
    """What one results file shows."""
    on_cuda = result["on_cuda"]
    if on_cuda:
        yield "![Tokens a second of plain decoding and of the embedded drafter, each in several ways](figures/gpu.svg)"
    yield f"### {'Measured on' if on_cuda else 'Tried without a GPU:'} {result['provenance']['device']}"
    if not on_cuda:
        yield (
            "The same script on a CPU: nothing is captured or compiled here, every piece of work is called as a function. How long that takes "
            "says nothing about a GPU and is not shown; the tables show that the ways run, what they keep of drafts, and that texts are the same."
        )
    yield goals_table(result["goals"])
    for cell in result["cells"]:
        if not cell["is_grid"]:
            yield from cell_tables(cell, on_cuda)
    yield from grid_table([cell for cell in result["cells"] if cell["is_grid"] and cell["rows"]], on_cuda)
    yield source_line(result, path)


def goals_table(goals: list[dict[str, Any]]) -> str:
    """Every goal of the captured step, and what was measured."""
    columns = {"goal": "{what}: {goal}", "measured": "{shown}", "": "{state}"}
    rows = [{**goal, "shown": shown(goal), "state": bold(goal["state"])} for goal in goals]
    return table(columns, rows)


def shown(goal: dict[str, Any]) -> str:
    """The number of a goal with its interval; a dash if there is none."""
    if goal["measured"] is None:
        return "-"
    interval = goal["interval"]
    return f"{goal['measured']:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def bold(state: str) -> str:
    """What needs attention stands out."""
    return state if state in (MET, NOT_MEASURED) else f"**{state}**"


def cell_tables(cell: dict[str, Any], on_cuda: bool) -> Iterator[str]:
    """A heading, the rows, and what did not run."""
    if not (cell["num_turns"] or cell["failures"] or cell.get("calls")):
        return
    yield f"#### {cell['name']}"
    yield f"Shape `{cell['shape']}`, {cell['num_turns']} of {cell['planned']} turns."
    if cell["rows"]:
        columns = SHOWN | ON_CUDA if on_cuda else {name: SHOWN[name] for name in TIMELESS}
        words = [{"shown": named(row), "texts": texts(row), **milliseconds(row)} for row in cell["rows"]]
        yield table(columns, [{**row, **more} for row, more in zip(cell["rows"], words, strict=True)])
    if cell.get("calls"):
        calls = cell["calls"]
        yield f"{calls['num_calls']} calls, {calls['num_captures']} graphs made, {len(calls['left_in_model'])} things left in the target."
    yield from remarks([cell])


def grid_table(cells: list[dict[str, Any]], on_cuda: bool) -> Iterator[str]:
    """All methods beside plain decoding in the static step, a line for each method, shape, decoding and number of rows."""
    if not cells:
        return
    columns = {"shape": "{shape}", "rows": "{num_rows}", "decoding": "{decoding}"}
    columns |= {name: SHOWN[name] for name in TIMELESS}
    if on_cuda:
        columns |= {"tokens/s (95 % interval)": SHOWN["tokens/s (95 % interval)"]}
        columns |= {"times `plain, static`": SHOWN["times the first line"]}
    yield "#### All methods"
    lines = [(cell, row) for cell in cells for row in cell["rows"]]
    firsts = {(cell["shape"], cell["num_rows"], cell["decoding"]): cell["rows"][0] for cell in reversed(cells)}
    shown_once = [*firsts.values()]  # plain decoding stands in every cell
    rows = [
        (cell, row) for cell, row in lines if row is not cell["rows"][0] or any(row is each for each in shown_once)
    ]
    yield table(columns, [{**cell, **row, "shown": named(row), "texts": texts(row)} for cell, row in rows])
    yield from remarks(cells)


def remarks(cells: list[dict[str, Any]]) -> Iterator[str]:
    """What of static steps is not in fixed shapes, and what did not run."""
    rows = [row for cell in cells for row in cell["rows"] if row["step"] == "static" and row["who"] != ROOT]
    notes = [(row["way"], note) for row in rows for note in row["notes"]]
    failures = [(way, f"not run. {why}") for cell in cells for way, why in cell["failures"].items()]
    lines = dict.fromkeys(f"- {way}: {what}" for way, what in (*notes, *failures))
    if lines:
        yield "\n".join(lines)


def named(row: dict[str, Any]) -> str:
    """The way of a row, which says so if it was not what was asked for."""
    if not row["fell_back"]:
        return row["way"]
    what = "some work ran uncaptured" if row["is_static"] else "took dynamic steps"
    return f"{row['way']} (**{what}**)"


def milliseconds(row: dict[str, Any]) -> dict[str, str]:
    """The phases of a step in milliseconds; dashes where nobody timed them."""
    phases = row["phases"] or {}
    return {
        f"{name}_ms": f"{1000 * phases[name]:.2f}" if name in phases else "-" for name in ("draft", "read", "accept")
    }


def texts(row: dict[str, Any]) -> str:
    """How many texts are plain decoding's own, and what the others are."""
    verdicts = row["verdicts"]
    if verdicts is None:
        return "-"
    others = [f"{count} {name}" for name, count in verdicts.items() if count and name != "identical"]
    return ", ".join([f"{verdicts['identical']} of {sum(verdicts.values())} identical", *others])
