"""The HTML page of a results file of `falcon-spec calibrate`: reliability before and after, and the temperatures."""

from typing import Any

from .pages import render
from .plots import reliability_plot

NODES = {"best_nodes": "The likeliest token of each list", "all_nodes": "The eight likeliest tokens of each list"}


def render_calibration_page(result: dict[str, Any]) -> str:
    """The page as one HTML file that needs nothing else.

    Raises:
        [`OptionError`]: matplotlib is not installed.
    """
    rows = [{**row, "set": row["decoding"]} for row in result["rows"]]
    sections = []
    for nodes, title in NODES.items():
        plot = reliability_plot(f"plot-{nodes}", rows, nodes)
        sections.append({"name": nodes.replace("_", "-"), "nodes": nodes, "title": title, "plot": plot})
    fit = result["fit"]
    positions = [f"{kind}, {number}" for kind in ("greedy", "sampled") for number in range(1, len(fit[kind]) + 1)]
    return render("calibration.html", {**result, "sections": sections, "headings": ["Fitted to", *positions]})
