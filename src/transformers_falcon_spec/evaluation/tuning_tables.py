"""Results of tuning into Markdown: speed by size of tree, the tuner beside fixed sizes, and where the time of a step goes."""

from typing import Any

from .tables import SET_NAMES, Rows, source_line, table


def budgets(result: dict[str, Any], name: str) -> str:
    """Speed-up and acceptance length of trees of every size, and of the tuner, set by set."""
    rows: Rows = result["rows"]
    sets, origin = list(dict.fromkeys(row["set"] for row in rows)), result["provenance"]
    found = {(row["decoding"], row["arm"], row["set"]): row for row in rows}
    lines = [f"### Speed by size of the tree, {_shape_words(result)}, {origin['threads']} threads"]
    for decoding in dict.fromkeys(row["decoding"] for row in rows):
        body = [
            [arm, *(_speed_and_length(found[decoding, arm, set_name]) for set_name in sets)]
            for arm in dict.fromkeys(row["arm"] for row in rows)
        ]
        header = [decoding, *(SET_NAMES.get(set_name, set_name) for set_name in sets)]
        lines += ["", table(header, body)]
    beside = [
        [
            row["decoding"],
            row["best_static"],
            row["arm"],
            f"{row['ratio']:.2f} ({' to '.join(f'{end:.2f}' for end in row['interval'])})",
        ]
        for row in result["beside_best_static"]
    ]
    lines += [
        "",
        "Speed beside the best static size, all prompts together; the best sizes are the best of these very runs:",
        "",
        table(["decoding", "best static size", "beside it", "times as fast (95 % interval)"], beside),
    ]
    return "\n".join([*lines, "", source_line(result, name)])


def circumstances(result: dict[str, Any], name: str) -> str:
    """The tuner beside the best fixed size of tree, under all circumstances."""
    body = [
        [
            str(row["threads"]),
            str(row["rows"]),
            str(row["context"]),
            f"{row['best']}: {row['speedups'][row['best']]:.2f}x",
            f"{row['speedups']['tuned']:.2f}x ({' to '.join(f'{end:.2f}' for end in row['tuned_speedup_interval'])})",
            f"{row['tuned_beside_best']:.2f} ({' to '.join(f'{end:.2f}' for end in row['tuned_beside_best_interval'])})",
            f"{row['num_identical']} of {row['num_batches']}",
        ]
        for row in result["rows"]
    ]
    header = [
        "threads",
        "rows",
        "context",
        "best of the fixed sizes",
        "tuned",
        "tuned beside best",
        "identical batches",
    ]
    lines = [
        f"### The tuner beside the best fixed size, {_shape_words(result)}",
        "",
        table(header, body),
        "",
        source_line(result, name),
    ]
    return "\n".join(lines)


def bookkeeping(result: dict[str, Any], name: str) -> str:
    """Where the time of drafted steps goes."""
    parts = ["target", "drafter", "lists", "bookkeeping"]
    body = [
        [
            row["decoding"],
            str(row["num_nodes"]),
            f"{row['milliseconds_a_step']:.1f} ms",
            *(
                f"{row[part]['share']:.1%} ({row[part]['interval'][0]:.1%} to {row[part]['interval'][1]:.1%})"
                for part in parts
            ),
        ]
        for row in result["rows"]
    ]
    lines = [
        f"### Where the time of a step goes, {_shape_words(result)}",
        "",
        "Shares of the time after the prompt was read (95 % interval). `lists`: chances of the drafter's logits; `bookkeeping`: growing and cutting trees, "
        "judging, caches, hooks, and Python.",
        "",
    ]
    return "\n".join([*lines, table(["decoding", "nodes", "a step", *parts], body), "", source_line(result, name)])


def _shape_words(result: dict[str, Any]) -> str:
    origin = result["provenance"]
    shape = "the embedded pair" if origin["shape"] == "None" else f"the pair inflated to `{origin['shape']}`"
    return f"{shape}, {origin['dtype']}"


def _speed_and_length(row: dict[str, Any]) -> str:
    low, high = row["speedup_interval"]
    return f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f}), {row['acceptance_length_pooled']:.2f} tokens"
