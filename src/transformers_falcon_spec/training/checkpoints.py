"""Which checkpoint a run can go on from. A checkpoint cut short by a full disk or a kill is passed over."""

import json
import logging
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

_STATE_FILE = "trainer_state.json"  # written last, so that a checkpoint with a whole one is whole


def newest_whole_checkpoint(folder: str | Path) -> str | None:
    """The checkpoint with the highest step whose every file was written; None where there is none."""
    found = sorted(Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=_step, reverse=True)
    for checkpoint in found:
        if _is_whole(checkpoint):
            return str(checkpoint)
        logger.warning("Passed over `%s`: it was cut short while being written.", checkpoint)
    return None


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _is_whole(checkpoint: Path) -> bool:
    try:
        state = json.loads((checkpoint / _STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    return state.get("global_step") == _step(checkpoint)
