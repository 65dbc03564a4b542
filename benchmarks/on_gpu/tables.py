"""The tables of a GPU in `docs/results.md`: the goals first, then every cell that has turns."""

from collections.abc import Iterator
from typing import Any

from benchmarks.report import Result, machine, source_line, table

from .cells import ORACLES, ROOT
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
ON_CUDA = {
    "device waits": "{waiting_share:.0%}",
    "peak memory, GiB": "{peak_bytes:GiB}",
    "graphs made in": "{capture_seconds:.1f} s",
}


def tables(result: Result, path: str) -> Iterator[str]:
    """What one results file shows."""
    if result["on_cuda"]:
        yield "![Tokens a second of plain decoding and of the embedded drafter, each in several ways](figures/gpu.svg)"
        yield f"### Measured on {result['provenance']['device']}"
    else:
        yield f"### Tried without a GPU: {machine(result['provenance'])}"
        yield (
            "The same script on a CPU: nothing is captured or compiled here, and every piece of work is called as a function. How long that takes "
            "says nothing about a GPU and is not shown."
        )
        yield same_texts(result["cells"])
        yield from remarks(result["cells"])
        yield source_line(result, path)
        return

    yield goals_table(result["goals"])
    for cell in result["cells"]:
        yield from cell_tables(cell)
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


def same_texts(cells: list[dict[str, Any]]) -> str:
    """How many ways ran and how many texts are plain decoding's own, in one sentence."""
    num_ways = num_texts = num_identical = 0
    for cell in cells:
        num_ways += len(cell["rows"])
        for row in cell["rows"]:
            if row["verdicts"] is not None:
                num_texts += sum(row["verdicts"].values())
                num_identical += row["verdicts"]["identical"]

    return f"{num_ways} ways of {len(cells)} cells ran; {num_identical} of {num_texts} texts are identical."


def cell_tables(cell: dict[str, Any]) -> Iterator[str]:
    """A heading, the rows, and what did not run."""
    if not (cell["num_turns"] or cell["failures"]):
        return
    yield f"#### {cell['name']}"
    yield f"Shape `{cell['shape']}`, {cell['num_turns']} of {cell['planned']} turns."
    if cell["rows"]:
        columns = SHOWN | ON_CUDA
        rows = []
        for row in cell["rows"]:
            rows.append({**row, "shown": named(row), "texts": texts(row), **milliseconds(row)})
        yield table(columns, rows)

    yield from remarks([cell])


def remarks(cells: list[dict[str, Any]]) -> Iterator[str]:
    """What of captured steps is not captured, and what did not run."""
    notes, failures = [], []
    for cell in cells:
        for row in cell["rows"]:
            if row["who"] not in (ROOT, *ORACLES):
                notes += [f"- {row['way']}: {note}" for note in row["notes"]]

        for way, why in cell["failures"].items():
            failures.append(f"- {way}: not run. {why}")

    lines = dict.fromkeys([*notes, *failures])
    if lines:
        yield "\n".join(lines)


def named(row: dict[str, Any]) -> str:
    """The way of a row, which says so if it was not what was asked for."""
    return f"{row['way']} (**some work ran uncaptured**)" if row["fell_back"] else row["way"]


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
