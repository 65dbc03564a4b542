"""The files of a drafter, in a folder or on the Hub: their kind, decoding options, and errors of reading."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from ..errors import CheckpointError
from ..generation.options import SpeculationConfig
from .saved_adapters import base_of_adapter, options_of_base


def hub_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that say where to look."""
    names = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}


def read_options(name_or_path: Any, **hub: Any) -> SpeculationConfig | None:
    """The options there; None where there are none."""
    found = cached_file(str(name_or_path), GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    if found is None:
        return None
    return cast(
        SpeculationConfig, SpeculationConfig.from_pretrained(name_or_path, **hub)
    )  # the base class is declared


@contextmanager
def readable(name_or_path: Any) -> Iterator[None]:
    """Inside, files of a folder that cannot be read are refused in words; what the Hub says stays as it is.

    Raises:
        [`CheckpointError`]: they cannot.
    """
    try:
        yield
    except (SafetensorError, UnpicklingError, EOFError, StrictDataclassError, OSError) as error:
        if name_or_path is None or (isinstance(error, OSError) and not Path(name_or_path).is_dir()):
            raise
        raise CheckpointError(
            f"`{name_or_path}` must hold files that can be read, but they cannot: "
            f"{' '.join(str(error).split())[:300]}. Fetch or save it again; a file cut short, or one that would run "
            "code, is never read."
        ) from error


def check_is_drafter(name_or_path: Any, model_types: Collection[str], **hub: Any) -> str:
    """The `model_type` of a drafter's config; refuses others, such as those of foreign checkpoints.

    Raises:
        [`CheckpointError`]: there is none, or it is none of `model_types`.
    """
    base = base_of_adapter(name_or_path, **hub)
    if base is not None:
        return check_is_drafter(base, model_types, **options_of_base(hub))
    try:
        config, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub)
        kind = config.get("model_type")
    except (TypeError, AttributeError) as error:  # Transformers takes it for an object, at once or not at all
        raise CheckpointError(
            f"`config.json` of `{name_or_path}` must hold a JSON object, but it holds something else. Fetch it again."
        ) from error
    if not config:
        raise CheckpointError(
            f"`{name_or_path}` must have a `config.json` that says what it holds, but it has none or an empty one. "
            "Fetch it again."
        )
    if kind not in model_types:
        raise CheckpointError(
            f"The `model_type` of `{name_or_path}` must be one of {sorted(model_types)}, but it is {kind!r}. A "
            f"checkpoint of other software must be converted first: `falcon-spec convert {name_or_path} DEST`. Draft "
            "models and DFlash drafters are for stock `generate`; `falcon-spec bench` takes draft models, and "
            "`LayerParallelDrafter.from_pretrained(NAME, target=target)` drafts with them."
        )
    return str(kind)
