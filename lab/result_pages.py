"""The HTML pages of results files of `falcon-spec bench`: tables, plots, failures, and what every number means.

Command: python -m lab.result_pages RESULTS.json ...
A page stands beside each file, of the same name with `.html`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.pages import render
from lab.plots import Plot, depth_plot, phase_plot, speedup_plot
from lab.tables import distinct, total, where
from transformers_falcon_spec.evaluation.methods import BASELINE
from transformers_falcon_spec.evaluation.prompts import SET_NAMES
from transformers_falcon_spec.evaluation.summary import (
    Record,
    changes_greedy_text,
    read_result,
)


def render_result(result: Record) -> str:
    """The page of a result as one HTML file that needs nothing else."""
    targets = distinct(result["methods"], "target")
    dtype = result["provenance"].get("dtype", "type not recorded")
    if isinstance(dtype, dict):
        dtype = ", ".join(f"{target} {name}" for target, name in dtype.items())

    names = distinct(result["methods"], "method")
    context = {
        "provenance": {**result["provenance"], "dtype": dtype},
        "targets": [_target(result, target, number) for number, target in enumerate(targets)],
        "num_methods": len({*names} - {BASELINE}),
        "num_texts": total(result["rows"], "num_runs"),
        "changed": [row for row in result["rows"] if changes_greedy_text(row)],
    }
    return render("speed.html", context)


def _target(result: Record, target: str, number: int) -> dict[str, Any]:
    """The part of the page about one target: its methods, and a section for each decoding."""
    methods = where(result["methods"], target=target)
    order = [method["method"] for method in methods if method["method"] != BASELINE]
    own = where(result["rows"], target=target)
    rows = _shown(sorted(own, key=lambda row: order.index(row["method"])))

    sections = []
    for index, decoding in enumerate(distinct(rows, "decoding")):
        name = f"t{number}d{index}"
        chosen = where(rows, decoding=decoding)
        plots = _plots(name, chosen, order)
        sections.append({"name": name, "decoding": decoding, "rows": chosen, "plots": plots})

    has_memory = any(method.get("peak_bytes") is not None for method in methods)
    return {"name": target, "methods": methods, "has_memory": has_memory, "sections": sections}


def _shown(rows: Sequence[Record]) -> list[Record]:
    """The rows set by set."""
    sets = distinct(rows, "set")
    shown = []
    for row in sorted(rows, key=lambda row: sets.index(row["set"])):
        name = SET_NAMES.get(row["set"], row["set"])
        shown.append({**row, "set": name, "changed": changes_greedy_text(row)})

    return shown


def _plots(name: str, rows: Sequence[Record], order: Sequence[str]) -> list[Plot]:
    plots = [
        speedup_plot(f"{name}-speedup", rows, order),
        depth_plot(f"{name}-depth", rows, order),
        phase_plot(f"{name}-phases", rows),
    ]
    return [plot for plot in plots if plot]


def main(argv: Sequence[str] | None = None) -> None:
    """Write a page beside each results file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    for path in parser.parse_args(argv).results:
        page = path.with_suffix(".html")
        page.write_text(render_result(read_result(path)), encoding="utf-8")
        print(f"{page} shows {path}")


if __name__ == "__main__":
    main()
