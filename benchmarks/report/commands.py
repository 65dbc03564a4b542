"""What this repository shows of results that commands wrote: `falcon-spec bench`, `parity` and `lab.calibration`."""

from pathlib import Path

from lab.report import calibration, parity, speed

from . import Report, Result, source_line, speed_by_set

PARITY = {
    "parity.json": "the test prompts",
    "parity_greedy.json": "more prompts",
    "parity_sampling.json": "twelve ways of sampling, equal seeds",
    "parity_bfloat16.json": "in bfloat16",
    "parity_float16.json": "in float16",
    "parity_static.json": "in fixed shapes, with the tuner",
    "parity_bfloat16_static.json": "in bfloat16 and fixed shapes",
}


def speed_tables(result: Result, path: str) -> list[str]:
    """The tables of `falcon-spec bench`."""
    return [speed(result, path)]


def compared_tables(result: Result, path: str) -> list[str]:
    """Many methods of `falcon-spec bench`, in short: the results file has the rest."""
    return [
        "### Speed against the target alone",
        "Interleaved runs, same prompts, same seeds, same stopping, both sides counted in token ids: times as fast as the target alone (95 % "
        "interval), and tokens a step.",
        *speed_by_set(result),
        source_line(result, path),
    ]


def parity_tables(result: Result, path: str) -> list[str]:
    """The table of `falcon-spec parity`, under what was compared."""
    return [parity(result, path, PARITY[Path(path).name])]


def calibration_tables(result: Result, path: str) -> list[str]:
    """The tables of `lab.calibration`."""
    return [calibration(result, path)]


REPORTS = (
    Report("docs/benchmarks.md", ["speed.json"], speed_tables),
    Report("docs/parity.md", [*PARITY], parity_tables),
    Report("docs/calibration.md", ["calibration.json"], calibration_tables),
    Report("docs/diffuspec.md", ["diffuspec_rivals.json"], compared_tables, order=1),
)
