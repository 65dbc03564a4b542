"""The tables of what `benchmarks/gpu_prices.py` found: acceptance as measured, and tokens a second as computed from it."""

from pathlib import Path
from typing import Any

from benchmarks.report import Result, by, distinct, named, source_line, table
from benchmarks.standings import POOLED, standings_table

TITLES = {
    "gpu_prices.json": "### At a GPU's prices, computed",
    "paper.json": "### The paper's comparison, computed",
}
TRAINED = {
    "drafter": "{method}",
    "steps": "{num_steps}",
    "conversations read": "{num_readings}",
    "of": "{num_examples}",
    "rate": "{learning_rate:g}",
    "next token right": "{accuracy:.3f}",
    "went on from": "{start}",
}


def tables(result: Result, path: str) -> list[str]:
    """Acceptance, then tokens a second and the standings at the first price, and the standings at the others."""
    origin, variants, (first, *others) = result["provenance"], result["variants"], result["prices"]
    parts = [
        TITLES[Path(path).name],
        f"Acceptance is measured: the small pair in float32, {origin['limit']} prompts a set, {origin['max_new_tokens']} tokens each, nothing tuned, sizes and "
        "passes chosen for each price on held-out prompts. Tokens a second are **computed** from it at measured prices; no run of a large target stands behind them.",
        "Trained on the same answers of the target, at these rates:",
        trained_table(result["trained"]),
    ]
    parts += ["Tokens a step (95 % interval over prompts), measured:", acceptance(variants), *at_price(first)]
    for price in others:
        parts += [f"Computed, {price['title']}:", pooled(price["standings"])] if price["standings"] else []
    return [*parts, source_line(result, path)]


def acceptance(variants: list[dict[str, Any]]) -> str:
    """Acceptance length of all variants: greedy on each set, and each way of decoding on all sets together."""
    known = {"who", "method", "num_nodes", "nodes_read", "passes_a_step"}
    decodings = [key for key in variants[0] if key not in known]
    sets = [key for key in variants[0][decodings[0]] if key not in ("pooled", "interval")]
    columns = {
        "method": "{method}",
        "nodes a step": "{nodes_read:.1f}",
        "passes a step": "{passes_a_step:.1f}",
        **{f"{decodings[0]}, {name}": cell for name, cell in named(sets, f"{{{decodings[0]}/@:.2f}}").items()},
        **{each: f"{{{each}/pooled:.2f}} ({{{each}/interval:~.2f}})" for each in decodings},
    }
    return table(columns, variants)


def at_price(price: dict[str, Any]) -> list[str]:
    """One price: what a pass costs, tokens a second of each variant, and who leads."""
    passes = [
        {"who": who, "bytes": price["pass_bytes"][who] / 1e9, "share": share}
        for who, share in price["pass_share"].items()
        if share
    ]
    rows, shown = price["rows"], "{@/tokens_per_second:.0f} ({@/interval:~.0f}), {@/times_plain:.2f}x"
    columns = {"method": "{variant}", **{each: shown.replace("@", each) for each in distinct(rows, "decoding")}}
    parts = [
        f"Computed, {price['title']}: the target alone writes {price['plain']:.0f} tokens a second. A pass reads:",
        table({"drafter": "{who}", "GB": "{bytes:.2f}", "of a plain step": "{share:.3f}"}, passes),
        "Computed tokens a second on all sets (95 % interval over prompts), and times as fast as the target alone:",
        table(columns, by(rows, "decoding", "variant")),
    ]
    if price["standings"]:
        parts.append(
            "Falcon drafters beside the best rival, which is one method over all sets together, and beside the first Falcon drafter, computed."
        )
        parts.append(standings_table(price["standings"]))
    return parts


def pooled(rows: list[dict[str, Any]]) -> str:
    """The standings on all sets together."""
    return standings_table([row for row in rows if row["set"] == POOLED])


def trained_table(rows: list[dict[str, Any]]) -> str:
    """How long each drafter was trained, and at which rate."""
    return table(TRAINED, rows)
