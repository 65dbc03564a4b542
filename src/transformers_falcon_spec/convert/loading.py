"""Loading the drafter of a name, whichever software made it: in the target's type, and where the target is."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import cached_assets_path
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # not listed as public
from transformers import PreTrainedModel

from ..drafters.base import DrafterModel
from ..drafters.checkpoint import check_is_drafter, check_name, kind_of, readable
from ..drafters.config_fields import target_fields
from ..drafters.registry import drafter_classes
from ..drafters.saved_adapters import base_of_adapter
from ..errors import CheckpointError
from .conversion import RECORD, convert_checkpoint
from .source import contents_of

_PACKAGE = __package__.partition(".")[0]


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
    drafter = read_drafter(str(name), target, revision)
    drafter.check_target(target)
    return drafter


def read_drafter(name: str, target: PreTrainedModel, revision: str | None = None) -> DrafterModel:
    """Load a drafter as [`load_drafter`] does, without the check that it fits."""
    check_name(name)
    hub = {} if revision is None else {"revision": revision}
    try:
        with readable(name):
            is_foreign = base_of_adapter(name, **hub) is None and kind_of(name, **hub) not in drafter_classes()
    except OSError as error:
        raise CheckpointError(
            f"`{name}` must be a folder with a drafter, or the name of one on the Hub, but there is no such folder, "
            f"and the Hub gives nothing for that name: {' '.join(str(error).split())[:300]} Check the name, the "
            "connection, and `hf auth login` if it is private."
        ) from error
    if is_foreign:
        name, hub = str(_converted(name, target, revision)), {}
    with readable(name):
        kind = drafter_classes()[check_is_drafter(name, drafter_classes(), **hub)]
    return kind.from_pretrained(name, dtype=target.dtype, **hub).eval().to(target.device)


def _converted(name: str, target: PreTrainedModel, revision: str | None) -> Path:
    """The folder of the drafter that a foreign checkpoint becomes for `target`; it is converted once."""
    contents = contents_of(name, revision)
    facts = [contents, _facts(target), version(_PACKAGE)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = cached_assets_path(_PACKAGE, "drafters", "converted") / f"{Path(name).name}-{digest}"
    with WeakFileLock(f"{folder}.lock"):  # several processes may load the same drafter
        if not (folder / RECORD).is_file():
            convert_checkpoint(name, folder, target, revision if Path(name).is_dir() else contents)
    return folder


def _facts(target: PreTrainedModel) -> dict[str, Any]:
    """What converters may read of a target: its name and its config, but not its dtype."""
    config = target.config.get_text_config(decoder=True).to_dict()
    return {**target_fields(target), **{key: value for key, value in config.items() if key != "dtype"}}
