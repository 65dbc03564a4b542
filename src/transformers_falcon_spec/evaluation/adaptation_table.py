"""A drafter adapted to a fine-tuned target as Markdown: acceptance and cost of every way to do it."""

from typing import Any

from .tables import interval, source_line, table

NONE = "-"


def adaptation(result: dict[str, Any], name: str) -> str:
    """Acceptance before and after, minutes, and what is saved."""
    decodings = list(result["rows"][0]["acceptance"])
    header = ["drafter", *(f"acceptance length, {name}" for name in decodings), "weights trained", "saved", "training"]
    body = [
        [
            row["name"],
            *(_length(row["acceptance"][decoding]) for decoding in decodings),
            f"{row['num_trained'] / 1e6:.2f} M" if row["num_trained"] else NONE,
            f"{row['bytes'] / 1e6:.1f} MB" if row["num_trained"] else NONE,
            f"{row['seconds'] / 60:.1f} min" if row["num_trained"] else NONE,
        ]
        for row in result["rows"]
    ]
    origin, seconds = result["provenance"], result["stage_seconds"]
    arms = {row["name"] for row in result["rows"]}
    shared = sum(
        taken for stage, taken in seconds.items() if stage not in arms and not stage.startswith("fine-tuning")
    )
    same = sum(found["num_identical"] for row in result["rows"] for found in row["acceptance"].values())
    texts = sum(found["num_prompts"] for row in result["rows"] for found in row["acceptance"].values())
    lines = [
        "### A target fine-tuned on another domain",
        "",
        f"The embedded target after {origin['tune_steps']} steps on made-up orders in JSON, SQL and tables; {origin['rows']} of its own answers, "
        f"{origin['steps']} steps of",
        f"{origin['per_device_train_batch_size']} for each way; trees of 16 nodes in one pass (so at most 4 tokens a step), not tuned, on {origin['prompts']} unseen questions (95 % interval). "
        f"{same} of {texts} texts are the target's own. Answers",
        f"and features, which all ways share, took {shared / 60:.1f} min.",
        "",
    ]
    return "\n".join([*lines, table(header, body), "", source_line(result, name)])


def _length(found: dict[str, Any]) -> str:
    return interval(found["acceptance_length"], found["acceptance_length_interval"])
