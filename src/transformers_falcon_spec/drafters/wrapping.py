"""Drafters that hold a whole model of Transformers: how that model and the tokenizers beside it are loaded. Knows no method of drafting."""

from collections.abc import Collection, Mapping
from typing import Any

from transformers import PreTrainedModel

from ..errors import CheckpointError, OptionError
from .base import readable
from .compatibility.weights import check_finite
from .option_files import hub_options
from .vocabulary import tokenizer_of


def remote_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments of `from_pretrained` that say where to look, and whether code that lies there may run: no, unless asked."""
    return {**hub_options(kwargs), "trust_remote_code": kwargs.get("trust_remote_code", False)}


def load_inner(
    auto_class: Any, name: Any, target: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> PreTrainedModel:
    """The model that drafts, in the target's type unless `kwargs` say otherwise.

    Raises:
        [`CheckpointError`]: files that cannot be read; weights that are missing or not finite.
    """
    with readable(name):
        options = {"dtype": target.dtype, **kwargs, "output_loading_info": True}
        model, info = auto_class.from_pretrained(name, *args, **options)
    if info["missing_keys"]:
        raise CheckpointError(
            f"`{name}` must hold all weights of `{type(model).__name__}`, but it lacks {sorted(info['missing_keys'])}. Take another "
            "checkpoint."
        )
    check_finite(model, name)
    inner: PreTrainedModel = model
    return inner


def tokenizers_beside(
    name: Any, target: PreTrainedModel, given: Collection[str], hub: Mapping[str, Any]
) -> dict[str, Any]:
    """The tokenizers that are not `given`: beside the weights of the model that drafts, and beside the target's."""
    places = {"tokenizer": (name, hub), "target_tokenizer": (target.config._name_or_path, {})}
    return {option: tokenizer_of(where, **how) for option, (where, how) in places.items() if option not in given}


def check_no_wrapping(kwargs: Mapping[str, Any], of_wrapping: Collection[str], what: str, name: Any) -> None:
    """Refuse options of wrapping `what` where a drafter is to be loaded.

    Raises:
        [`OptionError`]: there are some.
    """
    given = [option for option in of_wrapping if option in kwargs]
    if given:
        raise OptionError(
            f"{', '.join(f'`{option}`' for option in given)} must be left out unless a {what} is wrapped, with `target=...`, "
            f"but `{name}` is to be loaded as a drafter."
        )
