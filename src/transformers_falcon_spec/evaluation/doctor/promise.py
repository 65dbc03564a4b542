"""What a drafter promises: the acceptance in a results file of `falcon-spec bench`, else the accuracy in its training record."""

import json
from dataclasses import dataclass, field
from itertools import accumulate, count, takewhile
from operator import mul
from pathlib import Path
from typing import Any

from ...drafters.base import DrafterModel
from ...errors import OptionError
from ...provenance import project_folder, weights_fingerprint
from ..speed_results import is_whole, read_result
from .files import folder_of

RECORD = "training.json"


@dataclass(frozen=True)
class Promise:
    """What to expect of a drafter that works as it should.

    Args:
        source (`str`): The file that says so.
        acceptance_length (`float`): Tokens of a step, bonus token included: the best set of prompts, or a chain of best guesses.
        lowest (`dict[str, float]`): By set of prompts the lower end of the interval of that; empty for a training record.
        by_depth (`list[float]`): Share of steps that keep each depth among those that kept the one before; of the first set.
        prompts (`list[str]`): Prompt files that it was measured on, those of them that are here.
    """

    source: str
    acceptance_length: float
    lowest: dict[str, float] = field(default_factory=dict)
    by_depth: list[float] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)


def promise_of(name: str, drafter: DrafterModel, results: str | None) -> Promise | None:
    """What to expect of the drafter called `name`; None if neither results nor a training record say anything.

    Raises:
        [`OptionError`]: `results` holds no greedy runs of the drafter.
    """
    if results is not None:
        return _of_results(Path(results), name, drafter)
    folder = folder_of(name)
    path = folder / RECORD if folder is not None else None
    return _of_record(path) if path is not None and path.is_file() else None


def _of_results(path: Path, name: str, drafter: DrafterModel) -> Promise:
    result, weights = read_result(path), weights_fingerprint(drafter)
    arms = {method["arm"] for method in result["methods"] if method.get("weights") == weights}
    arms = arms or {name.rstrip("/").rpartition("/")[2]}
    rows = [row for row in result["rows"] if row["arm"] in arms and row["decoding"] == "greedy" and is_whole(row)]
    if not rows:
        raise OptionError(
            f"`results` must hold greedy runs of the drafter, but `{path}` has none of {sorted(arms)}. Measure some: `falcon-spec bench`."
        )
    return Promise(
        source=str(path),
        acceptance_length=max(row["acceptance_length_pooled"] for row in rows),
        lowest={row["set"]: row["acceptance_length_pooled_interval"][0] for row in rows},
        by_depth=rows[0]["acceptance_by_depth"],
        prompts=_at_hand(result["provenance"].get("prompts", [])),
    )


def _at_hand(files: list[str]) -> list[str]:
    """The files that exist, looked up from the current folder or from the project."""
    places = [[base / file for base in (Path(), project_folder()) if base is not None] for file in files]
    found = (next((place for place in each if place.is_file()), None) for each in places)
    return [str(place) for place in found if place is not None]


def _of_record(path: Path) -> Promise | None:
    """What its last evaluation kept when it decoded; without that how often the best guess was right at each place of a block.

    The latter is a floor for trees, which have more guesses.
    """
    curve: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")).get("curve", [])
    judged = [entry for entry in curve if "eval_accuracy_at_1" in entry]
    if not judged:
        return None
    if decoded := _series(judged[-1], "eval_acceptance_at_depth"):
        return Promise(
            source=str(path), acceptance_length=float(judged[-1]["eval_acceptance_length"]), by_depth=decoded
        )
    shares = _series(judged[-1], "eval_accuracy_at")
    return Promise(source=str(path), acceptance_length=1 + sum(accumulate(shares, mul)), by_depth=shares)


def _series(entry: dict[str, Any], name: str) -> list[float]:
    """The values of `<name>_1`, `<name>_2` and so on."""
    return [float(entry[key]) for key in takewhile(entry.__contains__, (f"{name}_{place}" for place in count(1)))]
