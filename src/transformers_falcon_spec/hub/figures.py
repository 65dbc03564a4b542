"""Figures of a drafter, from results files of `falcon-spec bench`: only those that its own weights and settings gave.

They become the table of a card, the `model-index` of its metadata, and `.eval_results/*.yaml`, the form the Hub reads
today.
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, EvalResultEntry

from ..drafters.base import DrafterModel
from ..errors import PublishError
from ..evaluation.prompts import SET_NAMES
from ..evaluation.speed_results import Result, Row, is_whole, read_result
from ..provenance import portable, weights_fingerprint

DATASETS = {
    "gsm8k": "openai/gsm8k",
    "humaneval": "openai/openai_humaneval",
    "mt_bench": "HuggingFaceH4/mt_bench_prompts",
}
METRICS = {"acceptance_length_pooled": "acceptance length", "speedup": "speed-up"}


@dataclass(frozen=True)
class Figures:
    """What one results file says of a drafter.

    Args:
        name (`str`): The file's name.
        origin (`dict`): Its provenance.
        dtype (`str`): The type that the target computed in.
        conditions (`dict[str, str | None]`): Revision of the target, digest of its chat template, and whether it was
            thinking; empty
            where the file does not say.
        rows (`tuple[Row, ...]`): One for each set of prompts and way of decoding.
    """

    name: str
    origin: dict[str, Any]
    dtype: str
    conditions: dict[str, str | None]
    rows: tuple[Row, ...]


def read_figures(paths: Iterable[str | Path], drafter: DrafterModel) -> list[Figures]:
    """The figures of `drafter` in each file.

    Raises:
        [`OptionError`]: a file is none of `falcon-spec bench`.
        [`PublishError`]: a file holds nothing of these weights and settings, or not all of its runs.
    """
    return [_figures(path, read_result(path), drafter) for path in map(Path, paths)]


def _figures(path: Path, result: Result, drafter: DrafterModel) -> Figures:
    dtypes = result["provenance"]["dtype"]
    found = [
        method
        for method in result["methods"]
        if method["kind"] == "drafter"
        and method["settings"] == drafter.draft_settings
        and method["weights"] == _fingerprint(drafter, dtypes[method["target"]])
    ]
    arms = {(method["target"], method["arm"]) for method in found}
    rows = tuple(row for row in result["rows"] if (row["target"], row["arm"]) in arms)
    if len(arms) != 1 or not rows:
        raise PublishError(
            f"`{path}` must hold the figures of this drafter, once, but {len(arms)} of its {len(result['methods'])} "
            "methods have its weights and settings. Measure it: `falcon-spec bench --methods DRAFTER`."
        )
    if not all(map(is_whole, rows)):
        raise PublishError(
            f"`{path}` must hold all runs of each row, but some are missing. Run its command again: it goes on."
        )
    method = found[0]
    return Figures(
        path.name, portable(result["provenance"]), dtypes[method["target"]], method.get("conditions") or {}, rows
    )


def _fingerprint(drafter: DrafterModel, dtype: str) -> str:
    """Of the weights in the type that they were measured in."""
    return weights_fingerprint(deepcopy(drafter).to(dtype=getattr(torch, dtype)))  # type: ignore[call-arg]


def eval_results(figures: Iterable[Figures]) -> list[EvalResult]:
    """The figures as the `model-index` of a card has them."""
    return [
        EvalResult(
            task_type="text-generation",
            task_name=f"speculative decoding, {row['decoding']}",
            dataset_type=DATASETS.get(row["set"], str(row["set"])),
            dataset_name=SET_NAMES.get(row["set"], str(row["set"])),
            metric_type=key,
            metric_name=f"{name}, {row['decoding']}",
            metric_value=row[key],
            metric_args={"interval_95": row[f"{key}_interval"], "num_prompts": row["num_prompts"]},
        )
        for each in figures
        for row in each.rows
        for key, name in METRICS.items()
        if key in row
    ]


def eval_entries(figures: Iterable[Figures]) -> list[EvalResultEntry]:
    """The figures as `.eval_results/*.yaml` has them, on sets of the Hub: each metric and way of decoding is a task.

    No benchmark of the Hub defines such tasks, so no leaderboard shows them beside accuracies on the same set.
    """
    return [
        EvalResultEntry(
            dataset_id=DATASETS[row["set"]],
            task_id=f"{key}/{row['decoding']}",
            value=row[key],
            date=each.origin["date"],
            notes=f"{name}, {row['decoding']}, {row['num_prompts']} prompts, "
            f"{each.origin['device']}, {each.dtype}; {each.name}",
        )
        for each in figures
        for row in each.rows
        if row["set"] in DATASETS
        for key, name in METRICS.items()
        if key in row
    ]
