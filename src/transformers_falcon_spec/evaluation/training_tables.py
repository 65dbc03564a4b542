"""Training measured, as Markdown: runs beside each other, recipes at the same cost, one thing changed at a time, and where the time goes."""

from typing import Any

from .tables import SET_NAMES, interval, source_line, table

NONE = "-"
ABLATIONS = {
    "recipe_ablation.json": "One thing changed at a time",
    "recipe_ablation_vocabulary.json": "Eagle-3 with a smaller vocabulary and with the whole one",
}


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
            interval(row["ratio"], row["interval"]),
        ]
        for row in result["beside"]
    ]
    lines = [
        "### Recipes at the same cost",
        "",
        f"{trained[0]['num_steps']} steps each on the same {trained[0]['num_examples']} conversations, one run each, seed {trained[0]['seed']}; accuracies on held-out",
        "answers, one, two ... tokens ahead. Minutes are those of a machine with other work.",
        "",
        table(["drafter", "training", "accuracy"], told),
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
    names = [*trained]
    arms = {arm: arm.rpartition("; ") for _decoding, arm in ratios}
    for arm, (drafter, _, passes) in sorted(arms.items(), key=lambda item: (names.index(item[1][0]), int(item[1][2]))):
        body.append([drafter, passes, " ".join(f"{share:.2f}" for share in trained[drafter]["accuracy"])])
        body[-1] += [_kept(found[decoding, arm]) for decoding in decodings]
        body[-1] += [
            interval(ratio["ratio"], ratio["interval"]) for ratio in (ratios[decoding, arm] for decoding in decodings)
        ]
    first = next(iter(trained.values()))
    header = ["drafter", "passes", "accuracy", *(f"length, {decoding}" for decoding in decodings)]
    header += [f"tokens a second, {decoding}" for decoding in decodings]
    lines = [
        f"### {ABLATIONS[name]}",
        "",
        f"The default recipe, then what differs from it; {first['num_steps']} steps each on the same {first['num_examples']} conversations, one run each, seed {first['seed']}. "
        f"Grown trees of {origin['nodes']}",
        f"nodes, not tuned, in so many passes, on {result['beside'][0]['num_prompts']} held-out prompts: acceptance length, and tokens a second beside the first line's, each with a 95 %",
        "interval over prompts, which knows nothing of what another seed would do. Accuracy is that on held-out answers, one, two ... tokens ahead.",
        "",
        table(header, body),
        "",
        source_line(result, name),
    ]
    return "\n".join(lines)


def training_speed(result: dict[str, Any], name: str) -> str:
    """What a training step costs: tokens a second, the target's share, memory, and each way beside the first."""
    origin = result["provenance"]
    body = [
        [
            row["name"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['target_share']:.0%}",
            f"{row['peak_process_bytes'] / 2**30:.1f} GiB",
            interval(row["ratio"], row["interval"]),
        ]
        for row in result["rows"]
    ]
    lines = [
        "### What training costs",
        "",
        f"The default recipe on the reference target, {origin['steps']} steps of 8 conversations, each process one thread, {origin['repeats']} runs of each in turn: tokens a second (the",
        "middle run), the share of the time that reading the target took, the most memory of a process, pages of features mapped from disk included, and times as fast as the first",
        "line (the middle of the ratios turn by turn, 95 % interval).",
        "",
        table(["features", "tokens a second", "share of the target", "memory", "times as fast"], body),
        "",
        source_line(result, name),
    ]
    return "\n".join(lines)


def _speed(row: dict[str, Any]) -> str:
    return f"{interval(row['speedup'], row['speedup_interval'])}, {row['acceptance_length_pooled']:.2f}"


def _kept(row: dict[str, Any]) -> str:
    return interval(row["acceptance_length_pooled"], row["acceptance_length_pooled_interval"])
