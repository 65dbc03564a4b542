"""Converting a checkpoint: it is read, its format detected, and the drafter written with a record of its source."""

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from ..drafters.base import DrafterModel
from ..drafters.target_class import target_class
from ..errors import CheckpointError, FalconSpecError, OptionError
from ..provenance import provenance
from .formats import detect
from .source import read_checkpoint
from .table import Checkpoint, Conversion, Format, read_drafter
from .vocabulary import read_object

RECORD = "conversion.json"  # written last: a folder that holds it is whole
# What a config with a value of another kind, or of none that is possible, makes Python, Transformers and torch raise.
_UNREADABLE = (StrictDataclassError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
logger = logging.getLogger(__name__)


def convert_checkpoint(
    source: str | Path,
    dest: str | Path,
    target: str | PreTrainedModel | None = None,
    revision: str | None = None,
) -> Format:
    """Write a foreign checkpoint as a drafter that `from_pretrained` loads.

    Args:
        source (`str` or `Path`): A folder, or the id of a Hub repository.
        dest (`str` or `Path`): The folder to write; new or empty.
        target (`str` or [`~transformers.PreTrainedModel`], *optional*):
            The target that the drafter was trained for, or its folder or Hub id. Its config is read, for diffusion
            models its tokenizer, too; sizes and tokens must fit. Embeddings that the source brings are compared with
            the target's.
        revision (`str`, *optional*): Branch, tag or commit of the source on the Hub.

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
    dest = Path(dest)
    check_is_new(dest)
    facts = read_target(target) if isinstance(target, str) else target
    with _readable_config(str(source)):
        checkpoint = read_checkpoint(str(source), revision, facts)
        table = detect(checkpoint.config, {name: tuple(value.shape) for name, value in checkpoint.tensors.items()})
        conversion = read_drafter(table, checkpoint)
    _write(conversion, dest, checkpoint, table)
    return table


def read_target(name: str) -> PreTrainedModel:
    """Read the config of a target, and make a model of it without weights."""
    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            target: PreTrainedModel = target_class(config, name).from_config(config)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"`--target` must name a folder or Hub id of a causal language model, but `{name}` is none: {error}"
        ) from error
    target.config._name_or_path = name
    return target


@contextmanager
def _readable_config(name: str) -> Iterator[None]:
    """Inside, values of a config that no drafter can have are refused in words."""
    try:
        yield
    except FalconSpecError:
        raise
    except _UNREADABLE as error:
        said = " ".join(str(error).split())[:300].rstrip(".")
        raise CheckpointError(
            f"The config of `{name}` must give values that its format can have, but reading it fails: "
            f"{type(error).__name__}: {said}. Fetch the `config.json` of the drafter itself."
        ) from error


def conversion_of(drafter: DrafterModel) -> dict[str, Any]:
    """The record beside the weights that a drafter was loaded from; an empty one where nothing was converted."""
    is_optional: Any = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    name = drafter.config._name_or_path
    found = cached_file(name, RECORD, **is_optional) if name else None
    return {} if found is None else read_object(Path(found))


def _write(conversion: Conversion, dest: Path, checkpoint: Checkpoint, table: Format) -> None:
    """Write the drafter to `dest`: all of its files, or none if anything fails."""
    if conversion.dropped:
        reasons = [f"{name}, {why}" for name, why in conversion.dropped.items()]
        logger.info("Left out: %s.", "; ".join(reasons))
    if conversion.filled:
        logger.info("Filled in, because the source does without them: %s.", conversion.filled)

    record = provenance(
        source=checkpoint.name,
        format=table.name,
        source_sha256=checkpoint.files,
        target=conversion.drafter.config.target_name_or_path,
        dropped_weights=sorted(conversion.dropped),
        filled_weights=conversion.filled,
    )
    with new_folder(dest) as folder:
        conversion.drafter.save_pretrained(folder)
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def check_is_new(dest: Path) -> None:
    """Refuse a destination that holds something already: [`OptionError`]."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise OptionError(f"`DEST` must be a new or an empty folder, but `{dest}` is not. Choose another one.")


@contextmanager
def new_folder(dest: Path) -> Iterator[Path]:
    """Inside, files are written to the folder that is given; it becomes `dest` at the end, unless anything fails."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # a temporary folder is its owner's alone
        if dest.exists():
            dest.rmdir()  # empty
        unfinished.rename(dest)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
