"""Drafters beside each other as Markdown: what they keep at equal node budgets."""

from typing import Any

from .tables import SET_NAMES, Rows, interval, source_line, table

SHOWN_NODES = 16  # the budget whose acceptance is shown depth by depth
NONE = "-"


def depths(result: dict[str, Any], name: str) -> str:
    """Acceptance length at every node budget, and acceptance by depth at one of them."""
    rows: Rows = result["rows"]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    parts = [
        "### Acceptance at equal node budgets",
        "",
        "Acceptance length (95 % interval over prompts), by nodes that the target reads in a step.",
    ]
    for decoding in dict.fromkeys(row["decoding"] for row in rows):
        chosen = [row for row in rows if row["decoding"] == decoding]
        parts += ["", f"{decoding.capitalize()}:", "", _lengths(chosen, sets)]
    greedy = [row for row in rows if row["decoding"] == "greedy" and row["num_nodes"] == SHOWN_NODES]
    parts += [
        "",
        f"Share kept at each depth of those kept above it, greedy, {SHOWN_NODES} nodes:",
        "",
        _by_depth(greedy),
    ]
    return "\n".join([*parts, "", source_line(result, name)])


def _lengths(rows: Rows, sets: list[str]) -> str:
    found = {(row["method"], row["num_nodes"], row["set"]): row for row in rows}
    body = [
        [method, str(num_nodes), *(_length(found.get((method, num_nodes, set_name))) for set_name in sets)]
        for method, num_nodes in sorted({(row["method"], row["num_nodes"]) for row in rows})
    ]
    return table(["method", "nodes", *(SET_NAMES.get(set_name, set_name) for set_name in sets)], body)


def _length(row: dict[str, Any] | None) -> str:
    if row is None:
        return NONE
    return interval(row["acceptance_length_pooled"], row["acceptance_length_pooled_interval"])


def _by_depth(rows: Rows) -> str:
    body = [
        [
            row["method"],
            SET_NAMES.get(row["set"], row["set"]),
            _length(row),
            " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"][:6]),
        ]
        for row in sorted(rows, key=lambda row: row["method"])
    ]
    return table(["method", "set", "acceptance length (95 % interval)", "depths 1, 2, ..."], body)
