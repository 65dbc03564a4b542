"""The class of Transformers that makes and loads a target: a language model, alone or behind images and sounds."""

from typing import Any

import transformers
from transformers import PreTrainedConfig

from ..errors import OptionError, quoted

_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")


def target_class(config: PreTrainedConfig, name: str) -> Any:
    """The auto class for a target with this config, which is called `name`.

    Of several it is the one that makes what the checkpoint was saved from.

    Raises:
        [`OptionError`]: no class that writes text knows this kind of model.
    """
    remote = getattr(config, "auto_map", None) or {}  # code that came with the model
    possible: list[Any] = []

    for each in _AUTO_CLASSES:
        auto_class = getattr(transformers, each, None)
        if auto_class is None:
            continue
        made = auto_class._model_mapping.get(type(config), None)
        if made is not None and made.__name__ in (config.architectures or ()):
            return auto_class
        if made is not None or each in remote:
            possible.append(auto_class)

    if not possible:
        raise OptionError(
            f"A target must be a language model, or one with images or sounds before its text, but `{name}` is of the "
            f"kind {config.model_type!r}, which {quoted(_AUTO_CLASSES)} do not make."
        )

    return possible[0]
