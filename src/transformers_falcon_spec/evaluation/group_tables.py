"""EasySpec measured, as Markdown: acceptance by group size and its ablations, and speed beside stock assisted generation."""

from collections.abc import Callable, Sequence
from typing import Any

from .tables import Rows, source_line, table

NONE = "-"


def group_acceptance(result: dict[str, Any], name: str) -> str:
    """Acceptance length of chains and trees by group size, and what leaving parts of the method out does to it."""
    rows, origin = result["rows"], result["provenance"]
    found = {(row["kind"], row["variant"], row["group_size"]): row for row in rows}
    sizes = sorted({row["group_size"] for row in rows})
    arms = list(dict.fromkeys((row["kind"], row["variant"]) for row in rows))

    def by_size(key: str, cell: Callable[[dict[str, Any] | None, str], str], shown: Sequence[int]) -> str:
        header = ["drafts", "variant", *(f"groups of {size}" for size in shown)]
        return table(header, [[*arm, *(cell(found.get((*arm, size)), key) for size in shown)] for arm in arms])

    groups = "; ".join(f"of {size}: {_groups(result['groups'][str(size)])}" for size in sizes)
    return "\n".join(
        [
            "### Acceptance by group size",
            "",
            f"Acceptance length (95 % interval over texts), {result['num_texts']} held-out texts of the target, greedy, drafts of {origin['depth']} tokens' depth,",
            f"trees of {origin['num_tree_nodes']} nodes. Layers by groups {groups}.",
            "",
            by_size("acceptance_length", _length, sizes),
            "",
            "Differences, text by text: EasySpec's own lines beside groups of 1, each ablation beside EasySpec with the same groups.",
            "",
            by_size("difference", _difference, [size for size in sizes if size > 1]),
            "",
            source_line(result, name),
        ]
    )


def _groups(groups: list[list[int]]) -> str:
    return " ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


def _length(row: dict[str, Any] | None, key: str) -> str:
    return NONE if row is None else f"{row[key]:.2f} ({_interval(row[f'{key}_interval'])})"


def _difference(row: dict[str, Any] | None, key: str) -> str:
    return NONE if row is None or key not in row else f"{row[key]:+.2f} ({_interval(row[f'{key}_interval'], '+.2f')})"


def _interval(ends: list[float], form: str = ".2f") -> str:
    return " to ".join(f"{end:{form}}" for end in ends)


def group_speed(result: dict[str, Any], name: str) -> str:
    """Seconds of single passes, then every arm beside the others it is held against."""
    origin, rows = result["provenance"], result["side_by_side"]
    shape = "the reference target" if origin["shape"] == "None" else f"the target inflated to `{origin['shape']}`"
    lines = [
        f"### Speed beside {shape}, {origin['dtype']}, {origin['threads']} threads",
        "",
        f"One drafted pass after {result['context']} tokens, milliseconds (medians), and how many times as fast (95 % interval) the fused one is:",
        "",
        _passes(result["passes"]),
    ]
    for decoding in dict.fromkeys(row["decoding"] for row in rows):
        chosen = [row for row in rows if row["decoding"] == decoding]
        lines += [
            "",
            f"Interleaved runs, {decoding}, {chosen[0]['num_prompts']} prompts; times as fast (95 % interval) as what the column names:",
            "",
            _beside(chosen),
        ]
    return "\n".join([*lines, "", source_line(result, name)])


def _passes(rows: Rows) -> str:
    header = [
        "tokens",
        "groups of",
        "groups",
        "without groups",
        "sequential",
        "fused",
        "beside sequential",
        "beside no groups",
    ]
    body = [
        [
            *(str(row[key]) for key in ("width", "group_size", "num_groups")),
            *(f"{1000 * row[f'{key}_seconds']:.2f}" for key in ("alone", "sequential", "fused")),
            *(_ratio(row[key]) for key in ("beside_sequential", "beside_alone")),
        ]
        for row in rows
    ]
    return table(header, body)


def _beside(rows: Rows) -> str:
    columns = list(dict.fromkeys(what for row in rows for what in row["beside"]))
    header = ["arm", "tokens/s", "acceptance length", "drafting, ms a step", "ms a pass", *columns]
    body = [
        [
            row["arm"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['acceptance_length']:.2f}",
            *(
                NONE if row[key] is None else f"{1000 * row[key]:.1f}"
                for key in ("draft_seconds_per_step", "draft_seconds_per_pass")
            ),
            *(_ratio(row["beside"].get(what)) for what in columns),
        ]
        for row in rows
    ]
    return table(header, body)


def _ratio(found: dict[str, Any] | None) -> str:
    return NONE if found is None else f"{found['ratio']:.2f}x ({_interval(found['interval'])})"
