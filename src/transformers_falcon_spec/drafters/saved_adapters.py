"""Adapters of drafters on disk: folders that PEFT wrote. Each names the drafter whose weights it changes."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME
from transformers.utils.peft_utils import find_adapter_config_file

from ..errors import CheckpointError

_WHOLE_PARTS = ".modules_to_save."  # in PEFT's names of weights
_OF_ADAPTER_ALONE = ("revision", "subfolder")  # of where to look; the drafter lies elsewhere


def base_of_adapter(name_or_path: Any, **hub: Any) -> str | None:
    """The model that an adapter was made for; None if this is no adapter, or a whole model that comes with one."""
    if name_or_path is None or (Path(name_or_path) / hub.get("subfolder", "") / CONFIG_NAME).is_file():
        return None

    file = find_adapter_config_file(name_or_path, **hub)
    if file is None:
        return None

    try:
        base = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"`{file}` must hold a JSON object, but it does not: {error}. Fetch it again."
        ) from error

    if not base:
        raise CheckpointError(
            f"`{file}` must name the model that the adapter changes as `base_model_name_or_path`, but it does not. "
            "Write it there, or load the model first and then `model.load_adapter(...)`."
        )

    return str(base)


def options_of_base(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained` for an adapter as its base takes them."""
    return {name: value for name, value in kwargs.items() if name not in _OF_ADAPTER_ALONE}


def put_adapter(drafter: PreTrainedModel, name_or_path: Any, **hub: Any) -> dict[str, Any]:
    """Load an adapter, all of it, into the drafter that it fits, and return what stock loading says."""
    try:
        info = drafter.load_adapter(str(name_or_path), adapter_kwargs=hub).to_dict()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise _misfit(drafter, name_or_path, " ".join(str(error).split())[:300]) from error

    if any(_WHOLE_PARTS in str(name) for name in info["missing_keys"]):
        raise CheckpointError(
            f"The parts that `{name_or_path}` saved as a whole beside LoRA must be loaded too, but they were not. "
            "Transformers 5.17 does not look for them: take a newer one, or load the drafter first and then "
            "`PeftModel.from_pretrained(drafter, ...)`."
        )

    wrong = {kind: sorted(map(str, found)) for kind, found in info.items() if found}
    if wrong:
        raise _misfit(drafter, name_or_path, str(wrong)[:300])

    return info


def _misfit(drafter: PreTrainedModel, name_or_path: Any, what: str) -> CheckpointError:
    return CheckpointError(
        f"The adapter `{name_or_path}` must fit the drafter `{drafter.name_or_path}`, a `{type(drafter).__name__}`, "
        f"but: {what}. Load it into the drafter that it was trained on."
    )
