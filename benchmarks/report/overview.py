"""The few numbers of the README: speed by machine and prompt set, and how many texts are the target's own."""

import json
from pathlib import Path
from typing import Any

from transformers_falcon_spec.evaluation.methods import BASELINE

from . import by, distinct, machine, named, sources_line, table, total
from .origins import check_one_commit, check_one_drafter

# Each of one machine and type; a file that is not there is left out.
SPEED = ("race.json", "speed_smollm2.json", "speed_gpu.json")
PARITY = ("parity_smollm2.json", "parity_smollm2_bfloat16.json")  # one type each


def overview(folder: Path) -> list[str]:
    """The table, the sentence on equal texts, and their sources, as far as a folder of results files has them."""
    speed, parity = _read(folder, SPEED), _read(folder, PARITY)
    parts = [_speed(speed)] if speed else []
    for result in speed.values():
        if "standings" in result:
            parts.append(_beside_rivals(result))
    if speed:
        parts.append("These are CPUs; [on a GPU](docs/results.md#on-a-gpu) little was measured.")
    parts += [_equal_texts(parity)] if parity else []
    parts += [sources_line({**speed, **parity})]
    return parts if speed or parity else []


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    files = {name: folder / name for name in names if (folder / name).is_file()}
    results = {name: json.loads(file.read_text("utf-8")) for name, file in files.items()}
    for name, result in results.items():
        check_one_commit(result, name)
    check_one_drafter(results)
    return results


def _speed(results: dict[str, Any]) -> str:
    """A row for each machine and way of decoding, a column for each prompt set; of a race the row of our drafter."""
    rows = []
    for result in results.values():
        name = _machine(result["provenance"])
        rivals = _rivals(result) if "standings" in result else set()
        for row in result["rows"]:
            if row["method"] not in {BASELINE, *rivals}:
                rows.append({**row, "machine": name})

    shown = "**{@/speedup:.2f}x** ({@/speedup_interval:~.2f}), {@/acceptance_length_pooled:.1f} tokens"
    sets = named(distinct(rows, "set"), shown)
    columns = {"machine": "{machine}", "prompts a set": "{num_prompts}", "decoding": "{decoding}", **sets}
    return table(columns, by(rows, "set", "machine", "num_prompts", "decoding"))


def _beside_rivals(race: dict[str, Any]) -> str:
    """How many times as fast as the best rival our drafter is, in each way of decoding."""
    ratios = []
    for row in race["standings"]:
        low, high = row["interval"]
        ratios.append(
            f"{row['decoding']} {row['ratio']:.2f} ({low:.2f} to {high:.2f}) times as fast as {row['other']}"
        )

    return f"Beside the best of {len(_rivals(race))} rivals, all prompts together: {'; '.join(ratios)} ([the race](docs/results.md#drafters-compared))."


def _rivals(race: dict[str, Any]) -> set[str]:
    """The methods of a race beside our drafter and the target alone."""
    ours = {row["method"] for row in race["standings"]}
    return {row["method"] for row in race["rows"]} - {BASELINE, *ours}


def _machine(origin: dict[str, Any]) -> str:
    dtypes = origin["dtype"].values() if isinstance(origin["dtype"], dict) else [origin["dtype"]]
    return ", ".join([machine(origin), *dict.fromkeys(dtypes)])


def _equal_texts(results: dict[str, Any]) -> str:
    """How many texts are the target's own in each type, and what the others are."""
    equal = []
    ties = bugs = 0
    for result in results.values():
        rows = result["rows"]
        num_equal, num_texts = total(rows, "identical"), total(rows, "num_prompts")
        equal.append(f"{num_equal} of {num_texts} in {result['provenance']['dtype']}")
        ties += total(rows, "tie")
        bugs += total(rows, "bug")

    return (
        f"Texts with a drafter that are the target's own, token for token: {', '.join(equal)}. Of the others, {ties} go on differently after a "
        f"proven tie of rounding, and {bugs} for another reason."
    )
