"""Finding the checkpoint to resume from, which was written to its end, and explaining failed writes."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import TrainingError

logger = logging.getLogger(__name__)

_STATE_FILE = "trainer_state.json"  # the Trainer writes it last, so a checkpoint is complete if this file is


def newest_complete_checkpoint(folder: str | Path) -> str | None:
    """The complete checkpoint with the highest step, or None if there is none."""
    names = (path.name.rpartition("-")[2] for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    for step in sorted((int(name) for name in names if name.isdigit()), reverse=True):
        checkpoint = Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        if is_complete(checkpoint):
            return str(checkpoint)
        logger.warning("Passed over `%s`: it was cut short while being written.", checkpoint)
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


def is_complete(checkpoint: Path) -> bool:
    """Whether all files of a checkpoint were written."""
    try:
        state = json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return "global_step" in state
