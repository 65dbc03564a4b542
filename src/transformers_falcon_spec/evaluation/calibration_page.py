"""One HTML page from a results file of `falcon-spec calibrate`: reliability before and after, and the temperatures."""

from typing import Any

from .pages import render
from .plots import reliability_plot

NODES = {"best_nodes": "The likeliest token of each list", "all_nodes": "The eight likeliest tokens of each list"}


def render_calibration_page(result: dict[str, Any]) -> str:
    """One HTML file that needs nothing else; names are escaped.

    Raises:
        [`OptionError`]: matplotlib is not installed.
    """
    rows = [{**row, "set": row["decoding"]} for row in result["rows"]]
    sections = [
        {
            "name": name.replace("_", "-"),
            "nodes": name,
            "title": title,
            "plot": reliability_plot(f"plot-{name}", rows, name),
        }
        for name, title in NODES.items()
    ]
    fit = result["fit"]
    places = [f"{kind}, {number}" for kind in ("greedy", "sampled") for number in range(1, len(fit[kind]) + 1)]
    return render("calibration.html", {**result, "sections": sections, "headings": ["Fitted to", *places]})
