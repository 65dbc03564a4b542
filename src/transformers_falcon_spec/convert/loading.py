"""Loading the drafter of a name, whichever software made it: in the target's type, and where the target is."""

import hashlib
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, cached_assets_path, constants
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the client that it uses
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # not listed as public
from torch import Tensor
from transformers import PreTrainedModel

from ..drafters.base import DrafterModel
from ..drafters.checkpoint import check_is_drafter, kind_of, readable
from ..drafters.config_fields import target_fields
from ..drafters.registry import drafter_classes
from ..drafters.saved_adapters import base_of_adapter
from ..errors import CheckpointError
from ..generation.model_parts import device_of
from ..provenance import file_sha256
from .conversion import RECORD, convert_checkpoint
from .source import contents_of

NUM_COMPARED = 1024  # rows of embeddings
_PACKAGE = __package__.partition(".")[0]
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_OLD_HUB_NAME = re.compile(r"[\w-][\w.-]*")  # such as `gpt2`; drafters have none


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
    name, hub = own_checkpoint(name, target, revision)
    with readable(name):
        kind = drafter_classes()[check_is_drafter(name, drafter_classes(), **hub)]
    return kind.from_pretrained(name, dtype=target.dtype, **hub).eval().to(device_of(target))


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
    said = " ".join(str(error).split())[:300].rstrip(".")
    return CheckpointError(
        f"`{name}` must be a folder with a {what}, or the name of one on the Hub, but there is no such folder, and "
        f"the Hub gives nothing for that name: {said}. Check the name, the connection, and `hf auth login` if it is "
        "private."
    )


def _converted(name: str, target: PreTrainedModel, revision: str | None) -> Path:
    """The folder of the drafter that a foreign checkpoint becomes for `target`; it is converted once."""
    contents = contents_of(name, revision)
    facts = [contents, _facts(target), _converters(), _embeddings(target)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = cached_assets_path(_PACKAGE, "drafters", "converted") / f"{Path(name).name}-{digest}"
    with WeakFileLock(f"{folder}.lock"):  # several processes may load the same drafter
        if not (folder / RECORD).is_file():
            convert_checkpoint(name, folder, target, revision if Path(name).is_dir() else contents)
    return folder


def _converters() -> list[str]:
    """What converts: the version of this package, and its files here, which change in a checkout without it."""
    return [version(_PACKAGE), *map(file_sha256, sorted(Path(__file__).parent.glob("*.py")))]


def _embeddings(target: PreTrainedModel) -> str:
    """What tells the embeddings of targets of one name apart, for those of a source are compared with them."""
    weight = getattr(target.get_input_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.is_meta:
        return ""
    sample = weight.detach()[:: max(len(weight) // NUM_COMPARED, 1), :8]
    plain = sample.to("cpu", torch.bfloat16).contiguous()  # as loaded in any type
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()


def _facts(target: PreTrainedModel) -> dict[str, Any]:
    """What converters may read of a target: its name and its config, but not its dtype."""
    config = target.config.get_text_config(decoder=True).to_dict()
    return {**target_fields(target), **{key: value for key, value in config.items() if key != "dtype"}}
