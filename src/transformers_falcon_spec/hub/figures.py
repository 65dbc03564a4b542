"""Measurements of a drafter, from results files of `falcon-spec bench` that its own weights and settings gave."""

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
from ..evaluation.results import Result, Row, is_complete, read_result
from ..provenance import portable, weights_fingerprint

DATASETS = {
    "gsm8k": "openai/gsm8k",
    "humaneval": "openai/openai_humaneval",
    "mt_bench": "HuggingFaceH4/mt_bench_prompts",
}
METRICS = {"acceptance_length_pooled": "acceptance length", "speedup": "speed-up"}


@dataclass(frozen=True)
class Figures:
    """The measurements of a drafter in one results file."""

    name: str  # of the file
    origin: dict[str, Any]  # its provenance
    dtype: str  # of the target
    conditions: dict[str, str | None]  # revision, chat template and thinking of the target, if the file records them
    rows: tuple[Row, ...]  # one for each set of prompts and way of decoding


def read_figures(paths: Iterable[str | Path], drafter: DrafterModel) -> list[Figures]:
    """Read the measurements of `drafter` from each file."""
    return [_figures(path, read_result(path), drafter) for path in map(Path, paths)]


def slower_than_alone(figures: Iterable[Figures]) -> list[str]:
    """The measurements by which the target is no faster with the drafter, a few words each."""
    return [
        f"{row['speedup']:.2f} times as fast on {row['set']}, {row['decoding']} (`{each.name}`)"
        for each in figures
        for row in each.rows
        if row["speedup"] <= 1
    ]


def _figures(path: Path, result: Result, drafter: DrafterModel) -> Figures:
    dtypes = result["provenance"]["dtype"]
    found = [
        method
        for method in result["methods"]
        if method["kind"] == "drafter"
        and method["settings"] == drafter.draft_settings
        and method["weights"] == _fingerprint(drafter, dtypes[method["target"]])
    ]
    names = {(method["target"], method["method"]) for method in found}
    rows = tuple(row for row in result["rows"] if (row["target"], row["method"]) in names)
    if len(names) != 1 or not rows:
        raise PublishError(
            f"`{path}` must hold the figures of this drafter, once, but {len(names)} of its {len(result['methods'])} "
            "methods have its weights and settings. Measure it: `falcon-spec bench --methods DRAFTER`."
        )
    if not all(map(is_complete, rows)):
        raise PublishError(
            f"`{path}` must hold all runs of each row, but some are missing. Run its command again: it goes on."
        )
    dtype, conditions = dtypes[found[0]["target"]], found[0].get("conditions") or {}
    return Figures(path.name, portable(result["provenance"]), dtype, conditions, rows)


def _fingerprint(drafter: DrafterModel, dtype: str) -> str:
    """The fingerprint of the weights in the dtype of the measurement."""
    return weights_fingerprint(deepcopy(drafter).to(dtype=getattr(torch, dtype)))  # type: ignore[call-arg]


def eval_results(figures: Iterable[Figures]) -> list[EvalResult]:
    """The measurements in the form of a card's `model-index`."""
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
    """The measurements on data sets of the Hub in the form of `.eval_results/*.yaml`.

    Each metric and way of decoding is a task. No benchmark of the Hub defines such tasks, so no leaderboard mixes them
    with accuracies on the same set.
    """
    return [
        EvalResultEntry(
            dataset_id=DATASETS[row["set"]],
            task_id=f"{key}/{row['decoding']}",
            value=row[key],
            date=each.origin["date"],
            notes=f"{name}, {row['decoding']}, {row['num_prompts']} prompts, {each.origin['device']}, {each.dtype}; "
            f"{each.name}",
        )
        for each in figures
        for row in each.rows
        if row["set"] in DATASETS
        for key, name in METRICS.items()
        if key in row
    ]
