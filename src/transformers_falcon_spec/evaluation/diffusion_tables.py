"""DiffuSpec measured, as Markdown: its ablations beside the paper's, speed and the phases of a round, and what the prefix cache saves."""

from typing import Any

from .tables import SET_NAMES, Rows, source_line, table

NONE = "-"
METHOD, LENGTH, PASSES = "method", "fixed length k", "passes S"
ALL_SETS = "all"
# arXiv 2510.02358v1: mean accepted tokens and speed-up over the six sets of Spec-Bench, Dream-7B drafting for Qwen2.5-32B, greedy. Table 2
# for the method, table 5 for lengths, the sensitivity study for passes.
PAPER: dict[tuple[str, str], tuple[float, float]] = {
    (METHOD, "CPS and adaptive length"): (6.99, 3.08),
    (METHOD, "CPS"): (6.95, 2.98),
    (METHOD, "adaptive length"): (6.43, 2.73),
    (METHOD, "neither"): (6.05, 2.69),
    (LENGTH, "10"): (5.53, 2.74),
    (LENGTH, "20"): (6.56, 2.98),
    (LENGTH, "30"): (6.49, 2.98),
    (LENGTH, "50"): (6.51, 2.91),
    (LENGTH, "100"): (6.69, 2.78),
    (PASSES, "10"): (7.33, 0.93),
}


def diffusion_ablation(result: dict[str, Any], name: str) -> str:
    """Acceptance length of every way to draft: path search and adaptive length by set, then one option at a time."""
    rows, origin, kinds = result["rows"], result["provenance"], result["drafters"]
    drafters = "; ".join(
        f"`{drafter}` attends `{kind['attention']}` and drafts {kind['block_size']} tokens"
        for drafter, kind in kinds.items()
    )
    return "\n".join(
        [
            "### What path search, adaptive length and their options bring",
            "",
            f"Acceptance length (95 % interval over texts), {result['num_texts']} texts of the target, greedy, at most {origin['max_new_tokens']} tokens. {drafters}.",
            "CPS here is the paper's: B 3, tau 0.8, M_max 15, lambda 0.5, one pass, drafts of a block, with a proxy fitted to the training answers.",
            "The last column is the paper's: mean accepted tokens and speed-up (arXiv 2510.02358, tables 2 and 5, and its study of S), of Dream-7B for Qwen2.5-32B",
            "on Spec-Bench. Its lengths are not those of a block, so they stand in rows of their own.",
            "",
            _by_set(rows, [*kinds]),
            "",
            "One factor at a time, all sets together, and the difference from CPS, text by text; the target reads `drafted` tokens of a draft in a round:",
            "",
            _by_factor(rows, [*kinds]),
            "",
            source_line(result, name),
        ]
    )


def _by_set(rows: Rows, drafters: list[str]) -> str:
    sets = sorted(
        dict.fromkeys(row["set"] for row in rows), key=lambda name: name == ALL_SETS
    )  # in order, all of them last
    found = {(row["drafter"], row["value"], row["set"]): row for row in rows if row["factor"] == METHOD}
    values = list(dict.fromkeys(value for _, value, _ in found))
    body = [
        [drafter, value, *(_length(found.get((drafter, value, name))) for name in sets), _paper(METHOD, value)]
        for drafter in drafters
        for value in values
    ]
    return table(["drafter", "drafts", *(SET_NAMES.get(name, name) for name in sets), "paper"], body)


def _by_factor(rows: Rows, drafters: list[str]) -> str:
    found = {(row["drafter"], row["factor"], row["value"]): row for row in rows if row["set"] == ALL_SETS}
    arms = list(dict.fromkeys(arm[1:] for arm in found))
    factors = list(dict.fromkeys(factor for factor, _ in arms))
    known = [*arms, *(arm for arm in PAPER if arm not in arms and arm[0] in factors)]
    columns = [cell for drafter in drafters for cell in (drafter, "beside CPS", "drafted")]
    body = [
        [
            *arm,
            *(cell for drafter in drafters for cell in _cells(found.get((drafter, *arm)))),
            _paper(*arm),
        ]
        for factor in factors
        for arm in known
        if arm[0] == factor
    ]
    return table(["factor", "value", *columns, "paper"], body)


def _cells(row: dict[str, Any] | None) -> list[str]:
    """Length, difference, and tokens drafted in a round."""
    if row is None:
        return [NONE] * 3
    low, high = row.get("difference_interval", (0, 0))
    beside = f"{row['difference']:+.2f} ({low:+.2f} to {high:+.2f})" if "difference" in row else NONE
    return [f"{row['acceptance_length']:.2f}", beside, f"{row['drafted_per_step']:.1f}"]


def _length(row: dict[str, Any] | None) -> str:
    if row is None:
        return NONE
    low, high = row["acceptance_length_interval"]
    return f"{row['acceptance_length']:.2f} ({low:.2f} to {high:.2f})"


def _paper(factor: str, value: str) -> str:
    if (factor, value) not in PAPER:
        return NONE
    length, speedup = PAPER[factor, value]
    return f"{length:.2f}, {speedup:.2f}x"


def diffusion_speed(result: dict[str, Any], name: str) -> str:
    """Every arm beside the target alone, by set, and where the time of a round goes."""
    origin, rows = result["provenance"], result["side_by_side"]
    shape = "the reference target" if origin["shape"] == "None" else f"the target inflated to `{origin['shape']}`"
    lines = [f"### Speed beside {shape}, {origin['dtype']}, {origin['threads']} threads"]
    for decoding in dict.fromkeys(row["decoding"] for row in rows):
        chosen = [row for row in rows if row["decoding"] == decoding]
        lines += [
            "",
            f"Interleaved runs, {decoding}, {chosen[0]['num_prompts']} prompts, at most {origin['max_new_tokens']} tokens; times as fast as the target alone (95 % interval):",
            "",
            _speeds(chosen, [row for row in result["rows"] if row["decoding"] == decoding]),
            "",
            "Milliseconds of a round, and the share of searching in it:",
            "",
            _phases(chosen),
        ]
    return "\n".join([*lines, "", source_line(result, name)])


def _speeds(rows: Rows, by_set: Rows) -> str:
    sets = list(dict.fromkeys(row["set"] for row in by_set))
    found = {(row["arm"], row["set"]): row for row in by_set}
    header = ["arm", "tokens/s", "acceptance length", "all sets", *(SET_NAMES.get(name, name) for name in sets)]
    body = [
        [
            row["arm"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['acceptance_length']:.2f}",
            _times(row["beside_target"]["ratio"], row["beside_target"]["interval"]),
            *(
                _times(of_set["speedup"], of_set["speedup_interval"])
                for of_set in (found[row["arm"], name] for name in sets)
            ),
        ]
        for row in sorted(rows, key=lambda row: -row["beside_target"]["ratio"])
    ]
    return table(header, body)


def _phases(rows: Rows) -> str:
    phases = ("draft", "search", "verify", "other")
    header = ["arm", "drafting", "searching", "verifying", "elsewhere", "share of searching"]
    body = [
        [
            row["arm"],
            *(f"{1000 * row[f'{phase}_seconds']:.2f}" for phase in phases),
            f"{100 * row['search_share']:.1f} %" if row["search_seconds"] else NONE,
        ]
        for row in sorted(rows, key=lambda row: row["arm"])
    ]
    return table(header, body)


def diffusion_cache(result: dict[str, Any], name: str) -> str:
    """Seconds of a drafted pass with the prefix cache and without, by the length of the text."""
    origin = result["provenance"]
    body = [
        [
            str(row["context"]),
            *(f"{1000 * row[f'{arm}_seconds']:.2f}" for arm in ("anew", "kept")),
            _times(row["beside"]["ratio"], row["beside"]["interval"]),
        ]
        for row in result["rows"]
    ]
    lines = [
        "### What the prefix cache saves",
        "",
        f"A drafted pass over {result['num_places']} places after a text of so many tokens, of which {origin['num_new']} are new since the last one, prefix-causal attention, {origin['threads']} threads: milliseconds (medians of {origin['repeats']}):",
        "",
        table(["tokens", "all read anew", "with the cache", "times as fast (95 % interval)"], body),
    ]
    return "\n".join([*lines, "", source_line(result, name)])


def _times(ratio: float, interval: list[float]) -> str:
    return f"{ratio:.2f}x ({interval[0]:.2f} to {interval[1]:.2f})"
