"""One HTML page from a results file of `falcon-spec bench`: tables, plots, what failed, and what every number means."""

import re
from collections.abc import Sequence
from typing import Any

from .methods import BASELINE
from .pages import render
from .plots import Plot, depth_plot, phase_plot, speedup_plot, tree_plot
from .prompts import SET_NAMES
from .speed_results import Result, Row, changes_greedy_text, failure_of, failures, is_complete, today


def render_speed_page(result: Result) -> str:
    """One HTML file that needs nothing else; names and messages are escaped.

    Raises:
        [`OptionError`]: matplotlib is not installed.
    """
    result = today(result)
    targets = list(dict.fromkeys(method["target"] for method in result["methods"]))
    context = {
        "provenance": _origin(result["provenance"]),
        "targets": [_target(result, target, place) for place, target in enumerate(targets)],
        "num_methods": len({method["arm"] for method in result["methods"]} - {BASELINE}),
        "num_texts": sum(row["num_runs"] for row in result["rows"]),
        "failures": failures(result),
        "changed": [row for row in result["rows"] if changes_greedy_text(row)],
    }
    return render("speed.html", context)


def _origin(provenance: dict[str, Any]) -> dict[str, Any]:
    """Provenance with its type in words; there is one for each target."""
    dtype = provenance.get("dtype", "type not recorded")
    words = ", ".join(f"{target} {name}" for target, name in dtype.items()) if isinstance(dtype, dict) else dtype
    return {**provenance, "dtype": words}


def _target(result: Result, target: str, place: int) -> dict[str, Any]:
    """What the page shows of one target: its methods, and a section for each decoding."""
    methods = [method for method in result["methods"] if method["target"] == target]
    order = [method["arm"] for method in methods if method["arm"] != BASELINE]
    rows = sorted((row for row in result["rows"] if row["target"] == target), key=lambda row: order.index(row["arm"]))
    decodings = list(dict.fromkeys(row["decoding"] for row in rows))
    return {
        "name": target,
        "methods": methods,
        "has_memory": any(method.get("peak_bytes") is not None for method in methods),
        "sections": [
            _section(result, [row for row in rows if row["decoding"] == name], methods, f"t{place}d{number}")
            for number, name in enumerate(decodings)
        ],
    }


def _section(result: Result, rows: Sequence[Row], methods: Sequence[Row], name: str) -> dict[str, Any]:
    """The rows of one decoding set by set, and their plots; rows that lack runs say why and are not drawn."""
    sets = list(dict.fromkeys(row["set"] for row in rows))
    shown = [
        {
            **row,
            "set": SET_NAMES.get(row["set"], row["set"]),
            "changed": changes_greedy_text(row),
            "failure": None if is_complete(row) else failure_of(result, row),
        }
        for set_name in sets
        for row in rows
        if row["set"] == set_name
    ]
    whole = [row for row in shown if row["failure"] is None]
    order = [method["arm"] for method in methods if method["arm"] != BASELINE]
    drawn: list[Plot | None] = [
        speedup_plot(f"{name}-speedup", whole, order),
        depth_plot(f"{name}-depth", whole, order),
        phase_plot(f"{name}-phases", whole, order),
        tree_plot(f"{name}-tree", tree_curves(whole, methods)),
    ]
    return {"name": name, "decoding": rows[0]["decoding"], "rows": shown, "plots": [plot for plot in drawn if plot]}


def tree_curves(rows: Sequence[Row], methods: Sequence[Row]) -> dict[str, list[tuple[int, Row]]]:
    """Sizes and rows of drafters that were measured with trees of several sizes.

    Methods are one drafter if they have the same weights and, where their names hold the size, the same name but for it.
    """
    by_arm = {method["arm"]: method for method in methods}
    curves: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for row in rows:
        method = by_arm[row["arm"]]
        num_nodes, weights = method.get("num_nodes"), method.get("weights")
        if "speedup" in row and num_nodes is not None and weights is not None:
            pattern = re.sub(rf"\b{num_nodes}\b", "N", row["arm"], count=1)
            key = (weights, pattern if pattern != row["arm"] else "")
            curves.setdefault(key, []).append((num_nodes, row))
    return {
        pattern or f"{found[0][1]['arm']} and others of its weights": found
        for (_, pattern), found in curves.items()
        if len({num_nodes for num_nodes, _ in found}) > 1
    }
