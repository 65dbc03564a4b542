"""The tables of what `benchmarks/gpu_prices.py` found: acceptance as measured, and tokens a second as computed from it."""

from pathlib import Path
from typing import Any

from benchmarks.report import EARLIER, Result, by, distinct, source_line, table, without_earlier
from benchmarks.standings import standings_table

TITLES = {
    "gpu_prices.json": "### At a GPU's prices, computed",
    "paper.json": "### The paper's comparison, computed",
}
TRAINED = {
    "drafter": "{method}",
    "steps": "{num_steps}",
    "conversations read": "{num_readings}",
    "rate": "{learning_rate:g}",
    "next token right": "{accuracy:.3f}",
}


def tables(result: Result, path: str) -> list[str]:
    """Acceptance, then tokens a second and the standings at the first price; results files have the other prices."""
    origin = result["provenance"]
    trained = ["Trained on the same answers of the target:", trained_table(result["trained"])]
    return [
        TITLES[Path(path).name],
        f"Acceptance is measured: the small pair in float32, {origin['limit']} prompts a set, {origin['max_new_tokens']} tokens each, nothing tuned, sizes and "
        "passes chosen for each price on held-out prompts. Tokens a second are **computed** from it at measured prices; no run of a large target stands behind them.",
        *at_price(result["prices"][0], result["variants"]),
        *(trained if "paper" in path else []),  # the others are those of the race
        source_line(result, path),
    ]


def at_price(price: dict[str, Any], variants: list[dict[str, Any]]) -> list[str]:
    """One price: tokens a step and a second of each variant that was chosen, and who leads."""
    lengths = {variant["method"]: variant for variant in variants}
    rows = [
        {**row, "length": lengths[row["variant"]][row["decoding"]]["pooled"]}
        for row in price["rows"]
        if not row["variant"].startswith(EARLIER)
    ]
    shown = "{@/length:.2f} tokens; {@/tokens_per_second:.0f}/s ({@/interval:~.0f}), {@/times_plain:.2f}x"
    columns = {"method": "{variant}", **{each: shown.replace("@", each) for each in distinct(rows, "decoding")}}
    parts = [
        f"Computed, {price['title']}: the target alone writes {price['plain']:.0f} tokens a second. "
        "Tokens a step, measured on all sets; computed tokens a second (95 % interval over prompts), and times as fast as the target alone:",
        table(columns, by(rows, "decoding", "variant")),
    ]
    if price["standings"]:
        parts.append("Falcon beside the best rival, all sets together, computed:")
        parts.append(standings_table(without_earlier(price["standings"])))

    return parts


def trained_table(rows: list[dict[str, Any]]) -> str:
    """How long each drafter was trained, and at which rate."""
    return table(TRAINED, rows)
