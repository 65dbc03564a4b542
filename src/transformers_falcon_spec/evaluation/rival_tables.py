"""Drafters beside each other as Markdown: how they were trained, and what they keep at equal node budgets."""

from typing import Any

from .tables import SET_NAMES, Rows, source_line, table

SHOWN_NODES = 16  # the budget whose acceptance is shown depth by depth
NONE = "-"


def training(result: dict[str, Any], name: str) -> str:
    """Training runs on the same data: rate, steps, loss and accuracy on held-out answers."""
    places = max(len(row["accuracy"]) for row in result["rows"])
    header = ["drafter", "learning rate", "steps", "loss", *(f"token {place + 1}" for place in range(places))]
    body = [
        [
            row["name"],
            f"{row['learning_rate']:g}",
            str(row["num_steps"]),
            f"{row['loss']:.3f}",
            *(f"{share:.3f}" for share in row["accuracy"]),
            *[NONE] * (places - len(row["accuracy"])),
        ]
        for row in result["rows"]
    ]
    lines = ["### Training", "", *result["description"], "", table(header, body), "", source_line(result, name)]
    return "\n".join(lines)


def recipes(result: dict[str, Any], name: str) -> str:
    """Recipes at the same cost: what training came to, speed and acceptance length, and the first beside the others."""
    origin, trained, rows = result["provenance"], result["trained"], result["rows"]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    told = [
        [
            row["name"],
            f"{row['train_seconds'] / 60:.0f} min",
            f"{row['train_tokens_per_second']:.0f}",
            f"{row['target_share']:.0%}",
            f"{row['peak_process_bytes'] / 2**30:.1f} GiB",
            " ".join(f"{share:.3f}" for share in row["accuracy"]),
        ]
        for row in trained
    ]
    found = {(row["decoding"], row["arm"], row["set"]): row for row in rows}
    speeds = [
        [decoding, arm, *(_speed(found[decoding, arm, set_name]) for set_name in sets)]
        for decoding, arm in dict.fromkeys((row["decoding"], row["arm"]) for row in rows)
    ]
    beside = [
        [
            row["decoding"],
            row["kind"],
            f"{row['first']} beside {row['other']}",
            _interval(row["ratio"], row["interval"]),
        ]
        for row in result["beside"]
    ]
    lines = [
        "### Recipes at the same cost",
        "",
        f"{trained[0]['num_steps']} steps each on the same {trained[0]['num_examples']} conversations, one run each, seed {trained[0]['seed']}; accuracies on held-out",
        "answers, one, two ... tokens ahead. Minutes and tokens a second are those of two runs at a time; the target's share is what reading it took; memory is",
        "the most that the process held.",
        "",
        table(["drafter", "training", "tokens a second", "share of the target", "memory", "accuracy"], told),
        "",
        f"The pairs inflated to `{origin['shape']}`, {origin['dtype']}, {origin['threads']} threads, grown trees, {origin['limit']} prompts a set: speed-up over the target alone",
        "(95 % interval) and acceptance length.",
        "",
        table(["decoding", "drafter", *(SET_NAMES.get(set_name, set_name) for set_name in sets)], speeds),
        "",
        f"All prompts together, {result['beside'][0]['num_prompts']} of them, times as fast (95 % interval):",
        "",
        table(["decoding", "trees", "drafters", "times as fast"], beside),
        "",
        source_line(result, name),
    ]
    return "\n".join(lines)


def recipe_ablation(result: dict[str, Any], name: str) -> str:
    """The default recipe with one thing changed at a time: acceptance length, and tokens a second beside the default's."""
    origin, trained = result["provenance"], {row["name"]: row for row in result["trained"]}
    found = {(row["decoding"], row["arm"]): row for row in result["rows"]}
    ratios = {(row["decoding"], row["arm"]): row for row in result["beside"]}
    decodings = list(dict.fromkeys(row["decoding"] for row in result["beside"]))
    body = []
    for arm in dict.fromkeys(row["arm"] for row in result["beside"]):
        drafter, _, passes = arm.rpartition("; ")
        body.append([drafter, passes, f"{trained[drafter]['train_seconds'] / 60:.1f}"])
        body[-1] += [_length(found[decoding, arm]) for decoding in decodings]
        body[-1] += [
            _interval(ratio["ratio"], ratio["interval"]) for ratio in (ratios[decoding, arm] for decoding in decodings)
        ]
    first = next(iter(trained.values()))
    header = ["drafter", "passes", "minutes", *(f"length, {decoding}" for decoding in decodings)]
    header += [f"tokens a second, {decoding}" for decoding in decodings]
    lines = [
        "### One thing changed at a time",
        "",
        f"The default recipe, then what differs from it; {first['num_steps']} steps each on the same {first['num_examples']} conversations, one run each, seed {first['seed']}. "
        f"Grown trees of {origin['nodes']}",
        f"nodes, not tuned, in so many passes, on {result['beside'][0]['num_prompts']} held-out prompts: acceptance length, and tokens a second beside the first line's, each with a 95 %",
        "interval over prompts, which knows nothing of what another seed would do. Minutes of training are those of two runs at a time.",
        "",
        table(header, body),
        "",
        source_line(result, name),
    ]
    return "\n".join(lines)


def _speed(row: dict[str, Any]) -> str:
    return f"{_interval(row['speedup'], row['speedup_interval'])}, {row['acceptance_length_pooled']:.2f}"


def _interval(value: float, ends: list[float]) -> str:
    return f"{value:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"


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
    return _interval(row["acceptance_length_pooled"], row["acceptance_length_pooled_interval"])


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
