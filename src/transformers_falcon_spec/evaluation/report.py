"""Results files into Markdown. Every number in the README stands between markers and comes from here."""

import json
from pathlib import Path
from typing import Any

from ..errors import OptionError

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
SET_NAMES = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-Bench"}
Rows = list[dict[str, Any]]


def render_into(document: Path, results: Path) -> None:
    """Replace what stands between the markers of `document` by the tables of every results file in a folder.

    Raises:
        [`OptionError`]: the document lacks the markers.
    """
    replace_between_markers(document, render(results))


def replace_between_markers(document: Path, tables: str) -> None:
    """Put `tables` where the old ones stood.

    Raises:
        [`OptionError`]: the document lacks the markers.
    """
    text = document.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise OptionError(f"`{document}` must hold the lines `{BEGIN}` and `{END}`; the tables go between them.")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    document.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")


def render(results: Path) -> str:
    """All tables that the results files in a folder allow, in a fixed order."""
    sections = [
        renderer(json.loads(path.read_text(encoding="utf-8")), path.name)
        for name, renderer in _RENDERERS.items()
        if (path := results / name).is_file()
    ]
    return "\n\n".join(sections)


def _speed(result: dict[str, Any], name: str) -> str:
    header = [
        "set",
        "decoding",
        "speed-up (95 % interval)",
        "gate",
        "acceptance length",
        "repeated 4-grams",
        "identical",
    ]
    body = [
        [
            SET_NAMES.get(row["set"], row["set"]),
            row["decoding"],
            f"**{row['speedup']:.2f}x** ({row['speedup_interval'][0]:.2f} to {row['speedup_interval'][1]:.2f})",
            f"{row['gate']:.2f}x",
            f"{row['acceptance_length']:.2f}",
            f"{row['repetition_rate']:.0%}",
            f"{row['num_identical']}/{row['num_compared']}",
        ]
        for row in result["rows"]
    ]
    costs = [
        [
            SET_NAMES.get(row["set"], row["set"]),
            row["decoding"],
            *(f"{1000 * row[key]:.1f}" for key in _COSTS),
            f"{row['overhead_share']:.1%}",
            " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"]),
        ]
        for row in result["rows"]
    ]
    cost_header = [
        "set",
        "decoding",
        "plain step",
        "drafting",
        "verifying",
        "elsewhere",
        "overhead",
        "acceptance by depth",
    ]
    return "\n".join(
        [
            "### Speed against the target alone",
            "",
            "Interleaved runs, same prompts, same seeds, same stopping, both sides counted in token ids. The gate is 0.9 x",
            "acceptance length / (cost of a step in plain steps): what the measured costs allow.",
            "",
            table(header, body),
            "",
            "Where a step's time goes, in milliseconds:",
            "",
            table(cost_header, costs),
            "",
            source_line(result, name),
        ]
    )


_COSTS = ("plain_seconds_per_step", "draft_seconds_per_step", "verify_seconds_per_step", "other_seconds_per_step")


def _parity(result: dict[str, Any], name: str) -> str:
    header = ["decoding", "prompts", "tokens", "identical", "proven ties", "different"]
    keys = ("decoding", "num_prompts", "num_tokens", "identical", "tie")
    body = [[*(str(row[key]) for key in keys), str(row.get("bug", row.get("different")))] for row in result["rows"]]
    return "\n".join(["### The same text", "", table(header, body), "", source_line(result, name)])


def _ablation(result: dict[str, Any], name: str) -> str:
    names = [SET_NAMES.get(name, name) for name in result["sets"]]
    header = ["drafter", "parameters", *names, "accuracy by block position (held-out)"]
    body = [
        [
            point["name"],
            f"{point['num_parameters'] / 1e6:.2f} M",
            *(_interval(point["acceptance"][set_name]) for set_name in result["sets"]),
            " ".join(f"{share:.2f}" for share in point["accuracy_by_block_position"]),
        ]
        for point in result["points"]
    ]
    lines = ["### Ablation", "", *result["description"], "", table(header, body), "", source_line(result, name)]
    return "\n".join(lines)


def _interval(row: dict[str, Any]) -> str:
    low, high = row["acceptance_length_interval"]
    return f"{row['acceptance_length']:.2f} ({low:.2f} to {high:.2f})"


def _bounds(result: dict[str, Any], name: str) -> str:
    costs = {size: f"{cost:.2f}" for size, cost in result["forward_cost"].items() if size != "1"}
    header = [
        "set",
        "tree",
        "length, 16 nodes",
        "length, 32 nodes",
        "bound, drafting free",
        "bound, drafting as dear as ours",
    ]
    body = [
        [
            SET_NAMES.get(row["set"], row["set"]),
            row["depth"],
            *(f"{row['acceptance_length'][size]:.2f}" for size in ("16", "32")),
            *(_bound(row[key]) for key in ("bound_without_drafting", "bound_with_drafting")),
        ]
        for row in result["rows"]
    ]
    return "\n".join(
        [
            "### What bounds the speed-up here",
            "",
            "A drafter that knew the target's own distribution: acceptance length of the best tree it could draft, and the speed-up that",
            f"is left at the measured price of a forward ({result['provenance']['decoding']}).",
            "",
            table(["nodes read", *costs], [["cost in plain steps", *costs.values()]]),
            "",
            table(header, body),
            "",
            source_line(result, name),
        ]
    )


def _bound(bound: dict[str, float]) -> str:
    return f"{bound['speedup']:.2f}x ({bound['num_nodes']} nodes)"


def _memory(result: dict[str, Any], name: str) -> str:
    header = ["", "peak memory, MiB"]
    body = [[row["name"], f"{row['bytes'] / 2**20:.1f}"] for row in result["rows"]]
    return "\n".join(
        ["### Memory", "", *result["description"], "", table(header, body), "", source_line(result, name)]
    )


def table(header: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def source_line(result: dict[str, Any], name: str) -> str:
    """Where the numbers of a results file come from."""
    origin = result["provenance"]
    versions = ", ".join(f"{package} {number}" for package, number in origin["versions"].items())
    return (
        f"Source: `benchmarks/results/{name}`; commit `{origin['commit'][:12]}`, {origin['date'][:10]}, {origin['device']}, "
        f"{origin['threads']} threads, seed {origin['seed']}; {versions}."
    )


_RENDERERS = {
    "speed.json": _speed,
    "parity.json": _parity,
    "bounds.json": _bounds,
    "ablation.json": _ablation,
    "memory.json": _memory,
}
