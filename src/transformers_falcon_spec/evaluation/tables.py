"""One results file into Markdown: a table for each kind of measurement."""

from collections.abc import Sequence
from typing import Any

from .speed_results import today

SET_NAMES = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt_bench": "MT-Bench", "held_out": "held-out"}
ABLATION_TITLES = {
    "ablation_csgd.json": "Chain and tree, with CSGD and without it, by the paper's recipe",
    "ablation.json": "Forms of a Falcon drafter",
}
Rows = list[dict[str, Any]]
PARITY_TITLES = {
    "parity.json": "the test prompts",
    "parity_tuned.json": "the test prompts, with the tuner choosing how much to draft",
    "parity_greedy.json": "more prompts",
    "parity_sampling.json": "twelve ways of sampling, equal seeds",
    "parity_bfloat16.json": "in bfloat16",
    "parity_float16.json": "in float16",
}


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


def parity(result: dict[str, Any], name: str) -> str:
    """Texts that are the target's own, by decoding."""
    header = ["decoding", "prompts", "tokens", "tokens a step", "identical", "proven ties", "different"]
    body = [
        [
            *(str(row[key]) for key in ("decoding", "num_prompts", "num_tokens")),
            "-" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}",
            *(str(row[verdict]) for verdict in ("identical", "tie", "bug")),
        ]
        for row in result["rows"]
    ]
    dtype, limit = (result["provenance"].get(key) for key in ("dtype", "max_new_tokens"))
    lines = [f"### The same text: {PARITY_TITLES[name]}", "", f"At most {limit} new tokens a text, {dtype}.", ""]
    return "\n".join([*lines, table(header, body), "", source_line(result, name)])


def ablation(result: dict[str, Any], name: str) -> str:
    """Drafters that differ in one thing."""
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
    lines = [
        f"### {ABLATION_TITLES[name]}",
        "",
        *result["description"],
        "",
        table(header, body),
        "",
        source_line(result, name),
    ]
    return "\n".join(lines)


def interval(value: float, ends: Sequence[float]) -> str:
    """A value and the interval around it."""
    return f"{value:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"


def _interval(row: dict[str, Any], key: str = "acceptance_length") -> str:
    return interval(row[key], row[f"{key}_interval"])


def bounds(result: dict[str, Any], name: str) -> str:
    """What a perfect drafter could reach."""
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


def memory(result: dict[str, Any], name: str) -> str:
    """Peak memory."""
    header = ["", "peak memory, MiB"]
    body = [[row["name"], f"{row['bytes'] / 2**20:.1f}"] for row in result["rows"]]
    return "\n".join(
        ["### Memory", "", *result["description"], "", table(header, body), "", source_line(result, name)]
    )


def batches(result: dict[str, Any], name: str) -> str:
    """Batches with and without the drafter."""
    header = [
        "rows",
        "target alone",
        "drafting",
        "tokens/s",
        "speed-up (95 % interval)",
        "acceptance length",
        "identical rows",
    ]
    arms = {"tuned": "as the tuner chooses", "every_step": "in every step"}
    body = [
        [
            str(row["size"]),
            f"{row['target_tokens_per_second']:.0f} tokens/s",
            words,
            f"{row[arm]['tokens_per_second']:.0f}",
            _interval(row[arm], "speedup"),
            f"{row[arm]['acceptance_length']:.2f}",
            f"{row[arm]['num_identical']}/{row[arm]['num_rows']}",
        ]
        for row in result["rows"]
        for arm, words in arms.items()
        if arm in row
    ]
    lines = ["### Batches", "", "Greedy, prompts of mixed length, all arms write the same batches in turn.", ""]
    return "\n".join([*lines, table(header, body), "", source_line(result, name)])


def verifiers(result: dict[str, Any], name: str) -> str:
    """What each rule keeps of a draft, and what a step of it costs."""
    header = [
        "`verifier`",
        "set",
        "tokens per step (95 % interval)",
        "cost of a step in plain steps",
        "speed-up (95 % interval)",
    ]
    body = [
        [
            f"`{row['arm']}`",
            SET_NAMES.get(row["set"], row["set"]),
            _interval(row, "acceptance_length_pooled"),
            f"{row['step_cost']:.2f}",
            f"{row['speedup']:.2f}x ({row['speedup_interval'][0]:.2f} to {row['speedup_interval'][1]:.2f})",
        ]
        for row in sorted(today(result)["rows"], key=lambda row: row["set"])
    ]
    return "\n".join([table(header, body), "", source_line(result, name)])


def soak(result: dict[str, Any], name: str) -> str:
    """What thousands of mixed calls leave behind."""
    counts, left = result["counts"], result["left_behind"]
    broken = sum(count for kind, count in counts.items() if kind.startswith("broken off"))
    held = {
        "resident memory, KiB": ("resident_bytes", 1 / 1024),
        "tensors": ("num_tensors", 1),
        "objects": ("num_objects", 1),
    }
    body = [
        [what, *(f"{value * scale:.0f}" for value in (growth["per_thousand_calls"], *growth["interval"]))]
        for what, (kind, scale) in held.items()
        for growth in [result["growth"][kind]]
    ]
    lines = [
        "### Many calls in one process",
        "",
        f"{counts['calls']} calls of mixed options, {counts['batch']} of them batches, {broken} broken off by an exception. Left behind: "
        f"{left['hooks']} hooks, {left['threads']} threads, {left['recording_layers']} recording layers. Growth over the second half:",
        "",
    ]
    header = ["held", "a thousand calls", "from", "to (95 % interval)"]
    return "\n".join([*lines, table(header, body), "", source_line(result, name)])


def tree_cost(result: dict[str, Any], name: str) -> str:
    """What a tree of each size costs at each shape, in plain steps."""
    sizes = [cost["num_nodes"] for cost in result["rows"][0]["costs"]]
    header = ["target", "parameters", "plain step", *(f"{size} node{'s' * (size > 1)}" for size in sizes)]
    body = [
        [
            row["shape"],
            f"{row['num_parameters'] / 1e6:.0f} M",
            f"{1000 * row['plain_seconds']:.1f} ms",
            *(interval(cost["cost"], cost["interval"]) for cost in row["costs"]),
        ]
        for row in result["rows"]
    ]
    origin = result["provenance"]
    lines = [
        f"Cost of reading a tree in plain one-token steps (95 % interval), {origin['dtype']}, after {origin['context']} tokens. All but",
        "`small` are inflated: the small model's function at that shape's cost.",
        "",
    ]
    return "\n".join([*lines, table(header, body), "", source_line(result, name)])


def calibration(result: dict[str, Any], name: str) -> str:
    """How far a drafter's chances are from the truth, before and after calibration, and the temperatures."""
    header = [
        "decoding",
        "lists",
        "error of the best node, before",
        "after",
        "luck alone",
        "error of 8 nodes, before",
        "after",
        "loss before",
        "saved (95 % interval)",
    ]
    body = [
        [
            row["decoding"],
            str(row["num_lists"]),
            *(f"{row[side]['best_nodes']['error']:.3f}" for side in ("before", "after")),
            f"{row['after']['best_nodes']['error_by_luck']:.3f}",
            *(f"{row[side]['all_nodes']['error']:.4f}" for side in ("before", "after")),
            f"{row['before']['loss']:.3f}",
            f"{row['loss_saved']:.3f} ({row['loss_saved_interval'][0]:.3f} to {row['loss_saved_interval'][1]:.3f})",
        ]
        for row in result["rows"]
    ]
    fits = [
        [words, *(" ".join(f"{value:.2f}" for value in found[part]) for part in ("greedy", "sampled"))]
        for words, found in [
            ("all prompts", result["fit"]),
            *((f"all but fold {number}", found) for number, found in enumerate(result["fits_of_folds"], start=1)),
        ]
    ]
    lines = [table(header, body), "", table(["temperatures fitted to", "greedy, by place", "sampled, by place"], fits)]
    return "\n".join([*lines, "", source_line(result, name)])
