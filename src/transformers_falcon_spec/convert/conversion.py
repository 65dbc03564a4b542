"""Converting checkpoints of other software, and loading the drafter of a name whichever software made it.

A conversion reads the checkpoint, detects its format and writes the drafter with a record of its source.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, cached_assets_path, constants
from huggingface_hub.errors import HTTPError, StrictDataclassError  # type: ignore[attr-defined]  # of its client
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # not listed as public
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from ..drafters.base import DrafterModel
from ..drafters.checkpoint import base_of_adapter, kind_of, readable
from ..drafters.config_fields import target_fields
from ..drafters.registry import class_of, drafter_classes
from ..drafters.target_loading import gguf_options, read_config, target_class
from ..errors import CheckpointError, FalconSpecError, OptionError, short
from ..generation.model_parts import device_of
from ..provenance import provenance
from .formats import detect
from .source import contents_of, read_checkpoint
from .table import Format, read_by_table
from .vocabulary import read_object

RECORD = "conversion.json"  # written last: a folder that holds it is whole
# What a config with a value of another kind, or of none that is possible, makes Python, Transformers and torch raise.
_UNREADABLE = (StrictDataclassError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
_NUM_COMPARED = 1024  # rows of embeddings
_PACKAGE = __package__.partition(".")[0]
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_OLD_HUB_NAME = re.compile(r"[\w-][\w.-]*")  # such as `gpt2`; drafters have none
logger = logging.getLogger(__name__)


def convert_checkpoint(
    source: str | Path,
    dest: str | Path,
    target: str | Path | PreTrainedModel | None = None,
    revision: str | None = None,
) -> Format:
    """Write a foreign checkpoint as a drafter that `from_pretrained` loads.

    Args:
        source (`str` or `Path`): A folder, or the id of a Hub repository.
        dest (`str` or `Path`): The folder to write; new or empty.
        target (`str`, `Path` or [`~transformers.PreTrainedModel`], *optional*):
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
    facts = read_target(str(target)) if isinstance(target, str | Path) else target

    with _readable_config(str(source)):
        checkpoint = read_checkpoint(str(source), revision, facts)
        table = detect(checkpoint.config, {name: tuple(value.shape) for name, value in checkpoint.tensors.items()})
        drafter, dropped, filled = read_by_table(table, checkpoint)
    if dropped:
        logger.info("Left out: %s.", "; ".join(map(", ".join, dropped.items())))
    if filled:
        logger.info("Filled in, because the source does without them: %s.", filled)

    record = provenance(
        source=checkpoint.name,
        format=table.name,
        source_sha256=checkpoint.files,
        target=drafter.config.target_name_or_path,
        dropped_weights=sorted(dropped),
        filled_weights=filled,
    )
    with new_folder(dest) as folder:
        drafter.save_pretrained(folder)
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return table


def read_target(name: str, gguf_file: str | None = None) -> PreTrainedModel:
    """Read the config of a target, and make a model of it without weights."""
    try:
        config = read_config(name, gguf_options(name, gguf_file))
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
        raise CheckpointError(
            f"The config of `{name}` must give values that its format can have, but reading it fails: "
            f"{type(error).__name__}: {short(error)}. Fetch the `config.json` of the drafter itself."
        ) from error


def conversion_of(drafter: DrafterModel) -> dict[str, Any]:
    """The record beside the weights that a drafter was loaded from; an empty one where nothing was converted."""
    is_optional: Any = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    name = drafter.config._name_or_path
    found = cached_file(name, RECORD, **is_optional) if name else None
    return {} if found is None else read_object(Path(found))


def check_is_new(dest: Path, name: str = "DEST") -> None:
    """Refuse a destination that holds something already: [`OptionError`]. Messages call it `name`."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise OptionError(f"`{name}` must be a new or an empty folder, but `{dest}` is not. Choose another one.")


@contextmanager
def new_folder(dest: Path) -> Iterator[Path]:
    """Inside, files are written to the folder that is given; they become those of `dest`, unless anything fails."""
    is_there = dest.exists()  # it may be the present folder, a link or a mounted volume, so it stays
    parent = dest if is_there else dest.parent
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=parent))
    try:
        yield unfinished
        if is_there:
            for path in sorted(unfinished.iterdir(), key=lambda path: path.name == RECORD):
                path.rename(dest / path.name)

            unfinished.rmdir()
        else:
            unfinished.chmod(0o755)  # a temporary folder is its owner's alone
            unfinished.rename(dest)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def load_drafter(name: str | Path, target: PreTrainedModel, revision: str | None = None) -> DrafterModel:
    """Load a drafter for `target`: of this package, with an adapter, or a checkpoint of other software.

    A checkpoint of other software (`docs/convert.md` lists them) is converted once for its contents and the sizes
    of the target, and kept beside the Hub's cache, in `HF_ASSETS_CACHE`. None of its code is run.

    Args:
        name (`str` or `Path`): A folder, or `OWNER/NAME` on the Hub.
        target ([`~transformers.PreTrainedModel`]): The target, already loaded; the drafter gets its dtype and device.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.

    Returns:
        [`DrafterModel`]: the drafter in evaluation mode, which fits `target`.

    Raises:
        [`CheckpointError`]: nothing is found under the name, or it is no drafter that is known or can be converted.
        [`DrafterMismatchError`]: the drafter was made for another target.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM
    >>> target = AutoModelForCausalLM.from_pretrained("models/reference-target")
    >>> drafter = load_drafter("models/falcon-reference", target)
    >>> type(drafter).__name__, drafter.dtype == target.dtype
    ('FalconSpecDrafter', True)

    ```
    """
    if isinstance(target, str | os.PathLike | DrafterModel):
        what = f"a `{type(target).__name__}`" if isinstance(target, DrafterModel) else f"the name {str(target)!r}"
        raise OptionError(
            f"`target` must be a language model that is loaded, but it is {what}. Load it with "
            "`AutoModelForCausalLM.from_pretrained`; the drafter's name comes first: `load_drafter(NAME, target)`."
        )

    drafter = read_drafter(str(name), target, revision)
    drafter.check_target(target)
    return drafter


def read_drafter(name: str, target: PreTrainedModel, revision: str | None = None) -> DrafterModel:
    """Load a drafter as [`load_drafter`] does, without the check that it fits."""
    name, hub = own_checkpoint(name, target, revision)
    return class_of(name, **hub).from_pretrained(name, dtype=target.dtype, **hub).eval().to(device_of(target))


def own_checkpoint(name: str, target: PreTrainedModel, revision: str | None = None) -> tuple[str, dict[str, Any]]:
    """Where the drafter of a name lies as one of this package, converted if need be, and the options to load it."""
    check_there(name)
    hub = {} if revision is None else {"revision": revision}
    try:
        with readable(name):
            is_foreign = base_of_adapter(name, **hub) is None and kind_of(name, **hub) not in drafter_classes()
    except OSError as error:
        raise _not_there(name, "drafter", error) from error
    return (str(_converted(name, target, revision)), {}) if is_foreign else (name, hub)


def check_there(name: str, what: str = "drafter") -> None:
    """Refuse a name under which there is no folder, nothing in the Hub's cache and nothing on the Hub.

    The Hub gets one request; loading repeats those that fail, for each file.
    """
    path = Path(name)
    is_hub_name = _HUB_NAME.fullmatch(name) or (what != "drafter" and _OLD_HUB_NAME.fullmatch(name))
    if not path.is_dir() and (path.exists() or not is_hub_name):
        found = "a file" if path.exists() else "no folder that is there"
        raise CheckpointError(
            f"A {what} must be a folder, or `OWNER/NAME` on the Hub, but `{name}` is {found}. Check the path."
        )
    if path.is_dir() or Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}").is_dir():
        return
    try:
        HfApi().model_info(name)
    except (OSError, HTTPError) as error:
        raise _not_there(name, what, error) from error


def _not_there(name: str, what: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"`{name}` must be a folder with a {what}, or the name of one on the Hub, but there is no such folder, and "
        f"the Hub gives nothing for that name: {short(error)}. Check the name, the connection, and `hf auth login` if "
        "it is private."
    )


def _converted(name: str, target: PreTrainedModel, revision: str | None) -> Path:
    """The folder of the drafter that a foreign checkpoint becomes for `target`; it is converted once."""
    contents = contents_of(name, revision)
    config = target.config.get_text_config(decoder=True).to_dict()
    config.pop("dtype", None)  # the drafter is loaded in the target's
    facts = [contents, {**target_fields(target), **config}, version(_PACKAGE), _embeddings(target)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = cached_assets_path(_PACKAGE, "drafters", "converted") / f"{Path(name).name}-{digest}"
    with WeakFileLock(f"{folder}.lock"):  # several processes may load the same drafter
        if not (folder / RECORD).is_file():
            convert_checkpoint(name, folder, target, revision if Path(name).is_dir() else contents)
    return folder


def _embeddings(target: PreTrainedModel) -> str:
    """What tells the embeddings of targets of one name apart, for those of a source are compared with them."""
    weight = getattr(target.get_input_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta:
        return ""
    sample = weight.detach()[:: max(len(weight) // _NUM_COMPARED, 1), :8]
    plain = sample.to("cpu", torch.bfloat16).contiguous()  # as loaded in any type
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()
