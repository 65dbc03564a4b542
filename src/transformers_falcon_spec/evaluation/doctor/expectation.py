"""The acceptance to expect of a drafter: from a results file of `falcon-spec bench`, else from its training record."""

import json
from dataclasses import dataclass, field
from itertools import accumulate, count, takewhile
from operator import mul
from pathlib import Path
from typing import Any

from ...drafters.base import DrafterModel
from ...errors import OptionError
from ...provenance import project_folder, weights_fingerprint
from ..results import is_complete, read_result
from .weight_files import folder_of

TRAINING_RECORD = "training.json"


@dataclass(frozen=True)
class Expectation:
    """The acceptance that a drafter reaches when it works as it should."""

    source: str  # the file that holds the numbers
    acceptance_length: float  # bonus token included: of the best prompt set, or of a chain of the best guesses
    lowest: dict[str, float] = field(default_factory=dict)  # lower end of its interval by prompt set, from results
    by_depth: list[float] = field(default_factory=list)  # acceptance at each depth whose parent was accepted
    prompts: list[str] = field(default_factory=list)  # the prompt files that were measured and are on this machine


def expected_acceptance(name: str, drafter: DrafterModel, results: str | None) -> Expectation | None:
    """What to expect of the drafter called `name`; None if there is neither a results file nor a training record."""
    if results is not None:
        return _from_results(Path(results), name, drafter)
    path = (folder_of(name) or Path(name)) / TRAINING_RECORD
    return _from_training(path) if path.is_file() else None


def _from_results(path: Path, name: str, drafter: DrafterModel) -> Expectation:
    result, weights = read_result(path), weights_fingerprint(drafter)
    methods = {method["method"] for method in result["methods"] if method.get("weights") == weights}
    methods = methods or {name.rstrip("/").rpartition("/")[2]}
    rows = [
        row for row in result["rows"] if row["method"] in methods and row["decoding"] == "greedy" and is_complete(row)
    ]
    if not rows:
        raise OptionError(
            f"`results` must hold greedy runs of the drafter, but `{path}` has none of {sorted(methods)}. "
            "Measure some: `falcon-spec bench`."
        )
    return Expectation(
        source=str(path),
        acceptance_length=max(row["acceptance_length_pooled"] for row in rows),
        lowest={row["set"]: row["acceptance_length_pooled_interval"][0] for row in rows},
        by_depth=rows[0]["acceptance_by_depth"],
        prompts=_existing(result["provenance"].get("prompts", [])),
    )


def _existing(files: list[str]) -> list[str]:
    """The files that exist, relative to the current folder or to the project."""
    folders = [folder for folder in (Path(), project_folder()) if folder is not None]
    found = (next((path for folder in folders if (path := folder / file).is_file()), None) for file in files)
    return [str(path) for path in found if path is not None]


def _from_training(path: Path) -> Expectation | None:
    """The last acceptance, else the accuracy of the best guess at each block position, a lower bound for trees."""
    curve: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")).get("curve", [])
    last = next((entry for entry in reversed(curve) if "eval_accuracy_at_1" in entry), None)
    if last is None:
        return None
    if by_depth := _series(last, "eval_acceptance_at_depth"):
        return Expectation(str(path), float(last["eval_acceptance_length"]), by_depth=by_depth)
    accuracies = _series(last, "eval_accuracy_at")
    return Expectation(str(path), 1 + sum(accumulate(accuracies, mul)), by_depth=accuracies)


def _series(entry: dict[str, Any], name: str) -> list[float]:
    """The values of `<name>_1`, `<name>_2` and so on."""
    return [float(entry[key]) for key in takewhile(entry.__contains__, (f"{name}_{number}" for number in count(1)))]
