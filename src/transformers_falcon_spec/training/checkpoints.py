"""Checkpoints of a run: whether one is whole, which run it belongs to, and what a failed write means.

The Trainer writes `trainer_state.json` as its last file. After it a manifest lists all files with their digests, and
the settings of the run; a process that is killed between the two leaves a checkpoint that is whole, but unproven.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, unwrap_peft_model

from ..errors import OptionError, TrainingError
from ..provenance import file_sha256
from .arguments import OWN_OPTIONS, DrafterTrainingArguments

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_STATE_FILE = "trainer_state.json"  # the Trainer writes it last, so all files were written if this one was
_OPTIMIZER = ("optimizer", "global_step")  # how files of an optimiser begin; the second are those of DeepSpeed
_MISSING = "nothing"
NUM_NAMED = 6  # changed settings that a message names
# Options of `TrainingArguments` that a resumed run would take from the checkpoint, or change in the middle.
_SHARED = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed", "data_seed"),
    "train_sampling_strategy",
)
# Of a drafter's config, what does not change what it learns, or is written when the run ends.
_PASSING = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("draft_tree", "confidence_temperatures", "target_name_or_path", "_attn_implementation"),
}


def newest_complete_checkpoint(folder: str | Path) -> str | None:
    """The whole checkpoint with the highest step, or None if there is none; it is said which are damaged."""
    by_step = {}
    for checkpoint in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = checkpoint.name.rpartition("-")[2]
        if step.isdigit():
            by_step[int(step)] = checkpoint

    for _, checkpoint in sorted(by_step.items(), reverse=True):
        fault = fault_of(checkpoint)
        if fault is None:
            return str(checkpoint)
        logger.warning("Passed over `%s`: %s.", checkpoint, fault)

    return None


@contextmanager
def explain_write_errors(folder: str | Path) -> Iterator[None]:
    """Turn a failed write inside this block, as on a full disk, into a [`TrainingError`] that says how to resume."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors raise errors of their own
        raise TrainingError(
            f"`{folder}` must take what the run writes, but it does not: {error}. Make room, then go on with "
            "`--resume_from_checkpoint true`: only the steps since the newest whole checkpoint are lost."
        ) from error


def seal(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint all of whose files are there: their digests, and the settings of the run."""
    digests = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            digests[path.relative_to(checkpoint).as_posix()] = file_sha256(path)
    content = {"files": digests, "settings": plain(settings)}
    (checkpoint / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def fault_of(checkpoint: Path) -> str | None:
    """Why a run cannot go on from a checkpoint, in words; None if all files are as they were written."""
    state = _read(checkpoint / _STATE_FILE)
    if "global_step" not in state:
        return f"it holds no whole `{_STATE_FILE}`, which is written last"

    files = _read(checkpoint / MANIFEST).get("files")
    if not isinstance(files, dict):
        return f"its `{MANIFEST}` is damaged" if (checkpoint / MANIFEST).exists() else None
    if not any(name.startswith(_OPTIMIZER) for name in files):
        return "it was saved without the optimiser's state (`save_only_model`), so that no run can go on from it"

    for name, digest in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"its file `{name}` is missing"
        if file_sha256(path) != digest:
            return f"its file `{name}` is cut short or damaged"

    return None


def run_settings(args: DrafterTrainingArguments, model: Any, data_digest: str, num_rows: int) -> dict[str, Any]:
    """What must stay the same from the first step of a run to its last: options, the drafter, and the data."""
    drafter: PreTrainedModel = unwrap_peft_model(model)
    settings = {"drafter": type(drafter).__name__, "adapter": model is not drafter}
    for name in (*_SHARED, *OWN_OPTIONS):
        settings[name] = getattr(args, name, None)

    settings["rows of a step"] = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size

    for name, value in drafter.config.to_dict().items():
        if name not in _PASSING:
            settings[f"drafter_config.{name}"] = value

    settings["rows of the data"] = num_rows
    settings["data"] = data_digest[:16]
    return settings


def check_same_run(checkpoint: Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on from the checkpoint of a run with other settings: they would not be used, or not from its start.

    Raises:
        [`OptionError`]: the settings differ.
    """
    before = _read(checkpoint / MANIFEST).get("settings")
    now = plain(settings)
    if not isinstance(before, dict) or before == now:
        return

    changes = []
    for name in {**before, **now}:
        old = before.get(name, _MISSING)
        new = now.get(name, _MISSING)
        if old != new:
            changes.append(f"`{name}` was {old} and is {new}")

    if len(changes) > NUM_NAMED:
        changes[NUM_NAMED:] = [f"{len(changes) - NUM_NAMED} more are others"]
    raise OptionError(
        f"`--resume_from_checkpoint` goes on with a run as it began, but in `{checkpoint}` {'; '.join(changes)}. Give "
        "the same options and data, or begin a new run: another `--output_dir`, and to train this drafter further, "
        f"`--drafter {checkpoint}`."
    )


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON gives them back."""
    found: dict[str, Any] = json.loads(json.dumps(dict(settings), default=str))
    return found


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is none, or no whole one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
