"""The few numbers of the README: speed by machine and prompt set, and how many texts are the target's own."""

import json
from pathlib import Path
from typing import Any

from .methods import BASELINE
from .speed_results import Row, is_whole, today
from .tables import SET_NAMES, table

SPEED = ("speed.json", "speed_gpu.json")  # one machine each; a file that is not there is left out
PARITY = ("parity.json", "parity_float16.json", "parity_bfloat16.json")  # one type each


def overview(folder: Path) -> list[str]:
    """The table, the sentence on equal texts, and their sources, as far as a folder of results files has them."""
    speed, parity = _read(folder, SPEED), _read(folder, PARITY)
    parts = [_speed(speed)] if speed else []
    parts += ["No GPU was measured."] if list(speed) == ["speed.json"] else []
    parts += [_equal_texts(parity)] if parity else []
    parts += ["Sources: " + "; ".join(_source(name, result) for name, result in {**speed, **parity}.items()) + "."]
    return parts if speed or parity else []


def _read(folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: json.loads((folder / name).read_text("utf-8")) for name in names if (folder / name).is_file()}


def _speed(results: dict[str, Any]) -> str:
    """A row for each machine and way of decoding, a column for each prompt set."""
    rows = [(name, row) for name, result in results.items() for row in today(result)["rows"]]
    rows = [(name, row) for name, row in rows if row["arm"] != BASELINE and is_whole(row)]
    sets = list(dict.fromkeys(row["set"] for _, row in rows))
    cells = {(name, row["decoding"], row["set"]): _cell(row) for name, row in rows}
    lines = dict.fromkeys((name, row["decoding"]) for name, row in rows)
    body = [
        [
            _machine(results[name]["provenance"]),
            decoding,
            *(cells.get((name, decoding, set_name), "-") for set_name in sets),
        ]
        for name, decoding in lines
    ]
    return table(["machine", "decoding", *(SET_NAMES.get(name, name) for name in sets)], body)


def _machine(origin: dict[str, Any]) -> str:
    dtypes = origin["dtype"].values() if isinstance(origin["dtype"], dict) else [origin["dtype"]]
    return ", ".join([origin["device"], *dict.fromkeys(dtypes)])


def _cell(row: Row) -> str:
    low, high = row["speedup_interval"]
    return f"**{row['speedup']:.2f}x** ({low:.2f} to {high:.2f}), {row['acceptance_length_pooled']:.1f} tokens"


def _equal_texts(results: dict[str, Any]) -> str:
    """How many texts are the target's own in each type, and what the others are."""
    counts = [
        (result["provenance"]["dtype"], {key: sum(row[key] for row in result["rows"]) for key in _COUNTS})
        for result in results.values()
    ]
    equal = ", ".join(f"{count['identical']} of {count['num_prompts']} in {dtype}" for dtype, count in counts)
    ties, bugs = (sum(count[key] for _, count in counts) for key in ("tie", "bug"))
    return (
        f"Texts that are the target's own, token for token: {equal}. Of the others, {ties} go on differently after a proven tie of "
        f"rounding, and {bugs} for another reason."
    )


_COUNTS = ("num_prompts", "identical", "tie", "bug")


def _source(name: str, result: dict[str, Any]) -> str:
    origin = result["provenance"]
    return f"`benchmarks/results/{name}` (commit `{origin['commit'][:7]}`, {origin['date'][:10]}, {origin['threads']} threads)"
