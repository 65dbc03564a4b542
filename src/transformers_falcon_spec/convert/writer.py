"""A converted drafter on disk: config, safetensors, options, and `conversion.json`, which says where it comes from."""

import json
import logging
import shutil
import tempfile
from pathlib import Path

from ..errors import OptionError
from ..provenance import provenance
from .exact import Conversion, whole_drafter
from .formats import Format
from .source import Checkpoint

RECORD_FILE = "conversion.json"
logger = logging.getLogger(__name__)


def check_free(dest: Path) -> None:
    """Refuse to write over anything.

    Raises:
        [`OptionError`]: `dest` is a file, or a folder with something in it.
    """
    if dest.exists() and not (dest.is_dir() and not any(dest.iterdir())):
        raise OptionError(f"`DEST` must be a new or an empty folder, but `{dest}` is not. Choose another place.")


def write(conversion: Conversion, dest: Path, checkpoint: Checkpoint, kind: Format) -> None:
    """Write the drafter to `dest`, all files or none.

    Raises:
        [`CheckpointError`]: a weight has another shape than the config says.
    """
    drafter = whole_drafter(conversion, checkpoint)
    if conversion.dropped:
        logger.info("Left out, because they are the target's own: %s.", ", ".join(conversion.dropped))
    if conversion.filled:
        logger.info("Filled in, because the source does without them: %s.", conversion.filled)
    dest.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        drafter.save_pretrained(part)
        record = provenance(
            source=checkpoint.name,
            format=kind.value,
            source_sha256=checkpoint.files,
            target=conversion.config.target_name_or_path,
            dropped_weights=conversion.dropped,
            filled_weights=conversion.filled,
        )
        (part / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        part.chmod(0o755)  # a temporary folder is its owner's alone
        if dest.exists():
            dest.rmdir()  # empty
        part.rename(dest)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
