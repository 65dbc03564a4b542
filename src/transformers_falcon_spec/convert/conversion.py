"""The way of a conversion: read, detect, convert, write."""

from pathlib import Path

from ..drafters.registry import METHODS, resolved
from .formats import Format, detect
from .source import read_checkpoint
from .target_facts import read_target
from .writer import check_free, write


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
    check_free(Path(dest))
    facts = None if target is None else read_target(target)
    checkpoint = read_checkpoint(str(source))
    kind = detect(checkpoint.config, checkpoint.tensors)
    convert = next(found for method in METHODS.values() if (found := method.converters.get(kind.value)))
    write(resolved(convert)(checkpoint, facts), Path(dest), checkpoint, kind)
    return kind
