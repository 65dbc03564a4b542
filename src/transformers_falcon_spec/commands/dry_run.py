"""The output of `falcon-spec train --dry_run`: facts about the run, and estimates of time and memory."""

import shutil
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from ..training.estimate import RunEstimate
from ..training.mask_coverage import MaskCoverage
from .memory import peak_resident_bytes


def print_dry_run(
    estimate: RunEstimate, target: PreTrainedModel, drafter: PreTrainedModel, coverage: MaskCoverage, cache: str | None
) -> None:
    """Print a table of facts and a table of estimates; `cache` is the folder for features on disk."""
    num_epochs = estimate.num_steps * estimate.rows_per_step / estimate.num_rows
    rows = "conversations" if estimate.num_rows == coverage.num_examples else "rows of conversations"
    num_trained = sum(weight.numel() for weight in drafter.parameters() if weight.requires_grad)
    facts = {
        "data": str(coverage),
        "target": _model(target),
        "drafter": f"{_model(drafter)}; {num_trained / 1e6:.2f} M are trained",
        "steps": f"{estimate.num_steps} of {estimate.rows_per_step} {rows}, {num_epochs:.2f} epochs",
        "features on disk": _disk(estimate, cache),
    }
    median, longest = statistics.median(estimate.step_seconds), max(estimate.step_seconds)
    costs = {
        "a step": f"{median:.3g} s in the median, {longest:.3g} s at most",
        "training": f"{_duration(estimate.train_seconds)}; evaluation and checkpoints are extra",
    }
    if estimate.extract_seconds is not None:
        costs["features, once"] = f"{_duration(estimate.extract_seconds)} to read the target and write them"
    if estimate.peak_device_bytes is not None:
        costs["device memory"] = f"{_gigabytes(estimate.peak_device_bytes)} at the peak, the longest batch included"
    costs["process memory"] = f"{_gigabytes(peak_resident_bytes())} at the peak, the longest batch included"
    _print_table("Nothing was trained or written. This would be:", facts)
    _print_table(f"ESTIMATE, from {len(estimate.step_seconds)} timed steps on this machine:", costs)


def _disk(estimate: RunEstimate, cache: str | None) -> str:
    if cache is None:
        return f"none; `--cache_features` would take {_gigabytes(estimate.cache_bytes)}"
    folder = next(path for path in [Path(cache).absolute(), *Path(cache).absolute().parents] if path.exists())
    free = shutil.disk_usage(folder).free
    return f"{_gigabytes(estimate.cache_bytes)} in `{cache}`, where {_gigabytes(free)} are free"


def _model(model: PreTrainedModel) -> str:
    num_parameters = sum(weight.numel() for weight in model.parameters())
    bare = unwrap_peft_model(model)
    name = type(bare).__name__ if bare is model else f"{type(bare).__name__} with an adapter"
    return f"{name}, {num_parameters / 1e6:.2f} M parameters in {str(model.dtype).removeprefix('torch.')}"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _print_table(title: str, entries: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    for entry in entries.items():
        table.add_row(*entry)
    Console(highlight=False).print(table)
