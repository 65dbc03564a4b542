"""Plots of results as inline SVG: speed-up, acceptance by depth, and seconds by phase.

Matplotlib draws stand-in colours, which become the page's own (`var(--...)`): one drawing serves light and dark.
"""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lab.tables import distinct, where
from transformers_falcon_spec.evaluation.summary import Record

NUM_COLORS = 8
WIDTH_INCHES = 4.6  # as wide as a phone, so that text is legible there without scrolling
_TEXT, _LINE = "#010101", "#020202"
_MARKERS = "osD^vPX*"
_LONGEST_IN_TWO_COLUMNS = 24  # letters of a label
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "plots",
    "text.parse_math": False,  # names may hold dollars
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _LINE),
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor"), _TEXT),
}
_PHASES = {
    "draft_seconds_per_step": "drafting",
    "verify_seconds_per_step": "verifying",
    "other_seconds_per_step": "elsewhere",
}


@dataclass(frozen=True)
class Plot:
    """A plot: its identifier on the page, its heading, a description in words, and the SVG."""

    name: str
    title: str
    description: str
    svg: str


def speedup_plot(name: str, rows: Sequence[Record], methods: Sequence[str]) -> Plot | None:
    """Bars of the speed-up with their intervals, a panel for each prompt set; None if nothing was compared."""
    rows = [row for row in rows if "speedup" in row]

    def draw(axes: Axes, panel: Sequence[Record]) -> None:
        for y, row in enumerate(panel):
            number, (low, high) = rows.index(row), row["speedup_interval"]
            bar = axes.barh(y, row["speedup"], color=_color(methods.index(row["method"])), height=0.7)[0]
            bar.set_gid(f"mark-bar-{number}")
            axes.plot([low, high], [y, y], color=_TEXT, linewidth=1.2, gid=f"mark-interval-{number}")
            axes.text(max(high, row["speedup"]) + 0.03, y, f"{row['speedup']:.2f}x", va="center")

        axes.axvline(1, color=_TEXT, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, 1.18 * max(max(row["speedup_interval"][1], row["speedup"], 1) for row in rows))
        _label_bars(axes, panel)

    described = [_described(row, f"{row['speedup']:.2f}x") for row in rows]
    return _plot(name, "Speed-up over the target alone, with 95 % intervals", "speed-up", described, rows, draw)


def depth_plot(name: str, rows: Sequence[Record], methods: Sequence[str]) -> Plot | None:
    """Lines of the acceptance by depth, a panel for each prompt set; depths that no step reached are left out."""
    rows = [row for row in rows if any(row["acceptance_by_depth"])]

    def draw(axes: Axes, panel: Sequence[Record]) -> None:
        for row in panel:
            shares = row["acceptance_by_depth"]
            reached = 1 + max(depth for depth, share in enumerate(shares) if share)
            style = _style(methods.index(row["method"]))
            (line,) = axes.plot(range(1, reached + 1), shares[:reached], label=row["method"], **style)
            line.set_gid(f"mark-line-{rows.index(row)}")

        axes.set_ylim(0, 1.05)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("kept")
        axes.grid(axis="y", linewidth=0.5)

    described = [_described(row, " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"])) for row in rows]
    return _plot(name, "Acceptance by depth", "depth", described, rows, draw, height=1.5)


def phase_plot(name: str, rows: Sequence[Record]) -> Plot | None:
    """Stacked bars of the seconds of a step by phase, a panel for each prompt set; a line marks a plain step."""

    def draw(axes: Axes, panel: Sequence[Record]) -> None:
        for y, row in enumerate(panel):
            left = 0.0
            for index, (key, phase) in enumerate(_PHASES.items()):
                width, label = 1000 * max(row[key], 0.0), phase if y == 0 else None
                bar = axes.barh(y, width, left=left, color=_color(index), height=0.7, label=label)[0]
                bar.set_gid(f"mark-{phase}-{rows.index(row)}")
                left += width

        plain = [row["plain_seconds_per_step"] for row in panel if row.get("plain_seconds_per_step")]
        if plain:
            axes.axvline(1000 * plain[0], color=_TEXT, linewidth=1.2, linestyle=":", label="step of the target alone")
        _label_bars(axes, panel)

    described = [
        _described(row, ", ".join(f"{1000 * row[key]:.1f} {phase}" for key, phase in _PHASES.items())) for row in rows
    ]
    return _plot(name, "Time of a step, by phase", "milliseconds", described, rows, draw)


def _described(row: Record, numbers: str) -> str:
    return f"{row['method']} on {row['set']} {numbers}"


def _plot(
    name: str,
    title: str,
    unit: str,
    described: Iterable[str],
    rows: Sequence[Record],
    draw: Callable[[Axes, Sequence[Record]], None],
    *,
    height: float | None = None,
) -> Plot | None:
    """A figure with a panel for each prompt set, `height` inches high; None takes the height of its bars."""
    if not rows:
        return None
    sets = distinct(rows, "set")
    panels = [where(rows, set=set_name) for set_name in sets]
    heights = [height or 0.24 * len(panel) + 0.35 for panel in panels]

    with rc_context(_STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 0.75), layout="constrained")
        grid = figure.subplots(len(sets), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]

        labels: dict[str, Any] = {}
        for axes, set_name, panel in zip(grid, sets, panels, strict=True):
            draw(axes, panel)
            axes.set_title(set_name)
            labels |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))

        grid[-1].set_xlabel(unit)
        if labels:
            num_columns = 2 if max(map(len, labels)) <= _LONGEST_IN_TWO_COLUMNS else 1
            figure.legend(labels.values(), labels.keys(), loc="outside upper left", ncols=num_columns)

        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})

    return Plot(name, title, f"{title}: {'; '.join(described)}.", _inline(drawn.getvalue(), name))


def _label_bars(axes: Axes, panel: Sequence[Record]) -> None:
    axes.set_yticks(range(len(panel)), [row["method"] for row in panel])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)


def _color(index: int) -> str:
    return f"#0300{index % NUM_COLORS:02x}"


def _style(index: int) -> dict[str, Any]:
    """The colour and marker of a line."""
    return {"color": _color(index), "marker": _MARKERS[index % len(_MARKERS)]}


def _inline(document: str, name: str) -> str:
    """Make an SVG document an element of a page, in the page's colours, with identifiers that are unique there."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    opening, closing, rest = svg.partition(">")
    opening = re.sub(r' (?:xmlns(?::\w+)?|width|height|version)="[^"]*"', "", opening)
    rest = rest.replace("xlink:href=", "href=")
    rest = re.sub(r'\bid="', f'id="{name}-', rest)
    rest = re.sub(r'href="#', f'href="#{name}-', rest)
    rest = rest.replace("url(#", f"url(#{name}-")
    for index in range(NUM_COLORS):
        rest = rest.replace(_color(index), f"var(--series-{index})")
    rest = rest.replace(_TEXT, "var(--text)").replace(_LINE, "var(--line)").replace("#000000", "var(--text)")
    labels = f' role="img" aria-labelledby="{name}-title" aria-describedby="{name}-description"'
    return f"{opening}{labels}{closing}{rest}"
