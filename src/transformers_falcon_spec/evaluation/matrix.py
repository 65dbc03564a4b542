"""The matrix of architectures as Markdown: what targets of each family can verify, from its results file."""

from collections import Counter
from typing import Any

from .tables import Rows, source_line, table

NO_VALUE = "-"
_HEADER = [
    "family",
    "configuration",
    "eager: error / control",
    "SDPA: error / control",
    "equal tokens",
    "acceptance length",
]


def matrix(result: dict[str, Any], name: str) -> str:
    """One table for each verdict; a family has one line, its attention implementations side by side."""
    families: dict[str, Rows] = {}
    for row in result["rows"]:
        if row["verdict"] != "not offered":
            families.setdefault(row["family"], []).append(row)
    by_verdict: dict[str, list[Rows]] = {}
    for rows in families.values():
        verdicts = list(dict.fromkeys(row["verdict"] for row in rows))
        by_verdict.setdefault(" or ".join(verdicts), []).append(rows)
    sections = [
        f"### {verdict.capitalize()}: {_count(group)}\n\n{_table(verdict, group)}"
        for verdict, group in by_verdict.items()
    ]
    return "\n\n".join([*sections, source_line(result, name)])


def matrix_in_short(result: dict[str, Any], name: str) -> str:
    """The counts of a matrix that was measured on another version, and where it left the target's text."""
    offered = [row for row in result["rows"] if row["verdict"] != "not offered"]
    families = {row["family"]: row["verdict"] for row in offered}
    verdicts = Counter(families.values())
    counts = ", ".join(f"{num} {verdict}" for verdict, num in verdicts.items())
    equal, tokens = (sum(row.get(key, 0) for row in offered) for key in ("num_equal", "num_tokens"))
    version = result["provenance"]["versions"]["transformers"]
    lines = [f"### On Transformers {version}", "", f"{counts}; {equal} of {tokens} tokens equal."]
    return "\n".join([*lines, "", source_line(result, name)])


def _count(group: list[Rows]) -> str:
    return f"{len(group)} {'family' if len(group) == 1 else 'families'}"


def _table(verdict: str, group: list[Rows]) -> str:
    if verdict == "refused":
        body = [[*_names(rows), ", ".join(row["attention"] for row in rows)] for rows in group]
        return table(["family", "configuration", "asked with"], body)
    body = [
        [
            *_names(rows),
            *(_errors(rows, attention) for attention in ("eager", "sdpa")),
            f"{sum(row['num_equal'] for row in rows)}/{sum(row['num_tokens'] for row in rows)}",
            ", ".join(f"{row['acceptance_length']:.2f}" for row in rows),
        ]
        for rows in group
    ]
    if verdict in ("paths", "chain"):  # their errors are those of no tree that is ever read
        return table(_HEADER[:2] + _HEADER[4:], [line[:2] + line[4:] for line in body])
    return table(_HEADER, body)


def _names(rows: Rows) -> list[str]:
    return [rows[0]["family"], f"`{rows[0]['config']}`"]


def _errors(rows: Rows, attention: str) -> str:
    """Error of a tree's logits and that of a wrong mask."""
    for row in rows:
        if row["attention"] == attention and "tree_error" in row:
            return f"{row['tree_error']:.0e} / {row['control_error']:.0e}"
    return NO_VALUE
