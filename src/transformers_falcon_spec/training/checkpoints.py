"""Which checkpoint a run can go on from. A checkpoint cut short by a full disk or a kill is passed over."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import TrainingError

logger = logging.getLogger(__name__)

_STATE_FILE = "trainer_state.json"  # written last, so that a checkpoint with a whole one is whole


def newest_whole_checkpoint(folder: str | Path) -> str | None:
    """The checkpoint with the highest step whose every file was written; None where there is none."""
    found = [
        path for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name.rpartition("-")[2].isdigit()
    ]
    for checkpoint in sorted(found, key=_step, reverse=True):
        if is_whole(checkpoint):
            return str(checkpoint)
        logger.warning("Passed over `%s`: it was cut short while being written.", checkpoint)
    return None


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


@contextmanager
def writing_to(folder: str | Path) -> Iterator[None]:
    """Say in words what failed when something inside this block could not be written, and how to go on.

    Raises:
        [`TrainingError`]: the disk is full, or refuses for another reason.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors each have one of their own
        raise TrainingError(
            f"`{folder}` must take what the run writes, but it does not: {error}. Make room, then go on with "
            "`--resume_from_checkpoint true`: only the steps since the newest whole checkpoint are lost."
        ) from error


def is_whole(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint was written."""
    try:
        state = json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return "global_step" in state
