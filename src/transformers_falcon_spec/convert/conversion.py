"""Converting a checkpoint: reading it, detecting its format, and writing the drafter with a record of its source."""

import json
import logging
import shutil
import tempfile
from pathlib import Path

from ..drafters.registry import METHODS, resolved
from ..errors import OptionError
from ..provenance import provenance
from .building import Conversion, build_drafter
from .formats import Format, detect
from .source import Checkpoint, read_checkpoint
from .target_facts import read_target

RECORD_FILE = "conversion.json"
logger = logging.getLogger(__name__)


def convert_checkpoint(source: str | Path, dest: str | Path, target: str | None = None) -> Format:
    """Write a foreign checkpoint as a drafter that `from_pretrained` loads.

    Args:
        source (`str` or `Path`): A folder, or the id of a Hub repository.
        dest (`str` or `Path`): The folder to write; new or empty.
        target (`str`, *optional*):
            Folder or Hub id of the target that the drafter was trained for. Its config is read; sizes must fit.

    Returns:
        [`Format`]: what the source was.

    Raises:
        [`CheckpointError`]: the source is no whole checkpoint of a format that can be converted.
        [`DrafterMismatchError`]: `target` has other sizes than the drafter was made for.
        [`OptionError`]: `dest` is taken, or `target` is no language model.

    Example:

    ```python
    >>> convert_checkpoint("models/falcon-reference", "unused")
    Traceback (most recent call last):
        ...
    transformers_falcon_spec.errors.CheckpointError: `SOURCE` must be a checkpoint of other software, ...

    ```
    """
    _check_free(Path(dest))
    facts = None if target is None else read_target(target)
    checkpoint = read_checkpoint(str(source))
    kind = detect(checkpoint.config, checkpoint.tensors)
    convert = next(found for method in METHODS.values() if (found := method.converters.get(kind.value)))
    _write(resolved(convert)(checkpoint, facts), Path(dest), checkpoint, kind)
    return kind


def _check_free(dest: Path) -> None:
    """Check that nothing would be overwritten."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise OptionError(f"`DEST` must be a new or an empty folder, but `{dest}` is not. Choose another place.")


def _write(conversion: Conversion, dest: Path, checkpoint: Checkpoint, kind: Format) -> None:
    """Write the drafter to `dest`: all of its files, or none if anything fails."""
    drafter = build_drafter(conversion, checkpoint)
    if conversion.dropped:
        logger.info("Left out, because they are the target's own: %s.", ", ".join(conversion.dropped))
    if conversion.filled:
        logger.info("Filled in, because the source does without them: %s.", conversion.filled)
    dest.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        drafter.save_pretrained(unfinished)
        record = provenance(
            source=checkpoint.name,
            format=kind.value,
            source_sha256=checkpoint.files,
            target=conversion.config.target_name_or_path,
            dropped_weights=conversion.dropped,
            filled_weights=conversion.filled,
        )
        (unfinished / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        unfinished.chmod(0o755)  # a temporary folder is its owner's alone
        if dest.exists():
            dest.rmdir()  # empty
        unfinished.rename(dest)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
