"""How Transformers reads a target: its class, a language model, alone or behind images and sounds, and GGUF files."""

import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, GgufConfig, PreTrainedConfig, PreTrainedModel

from ..errors import CheckpointError, OptionError, quoted
from .checkpoint import base_of_adapter

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
        auto_class = getattr(transformers, each)
        made = auto_class._model_mapping.get(type(config), None)
        if made is not None and made.__name__ in (config.architectures or ()):
            return auto_class
        if made is not None or each in remote:
            possible.append(auto_class)

    if not possible:
        raise OptionError(
            f"A target must be a language model, or one with images or sounds before its text, but `{name}` is of the "
            f"kind {config.model_type!r}, which {quoted(_AUTO_CLASSES)} do not make. Give "
            "the model that writes the text; a drafter is given as `--drafter`."
        )

    return possible[0]


# GGUF files

_UNREADABLE = (ValueError, NotImplementedError, KeyError, IndexError, OverflowError, struct.error)


def gguf_options(name: str, gguf_file: str | None = None) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a target whose weights are a GGUF file; none where they are not.

    The file is `gguf_file`, or the only one in a folder that holds no other weights.

    Raises:
        [`OptionError`]: such a folder holds several.
    """
    if gguf_file is None:
        folder = Path(name)
        found = sorted(path.name for path in folder.glob("*.gguf"))
        if not found or any(folder.glob("*.safetensors")) or any(folder.glob("*.bin")):
            return {}

        if len(found) > 1:
            raise OptionError(
                f"A target must be one file of weights, but `{name}` holds several: {quoted(found)}. Name one: "
                f"`--gguf_file {found[0]}`."
            )

        gguf_file = found[0]

    for package in ("gguf", "accelerate"):  # which Transformers asks for in words that name no extra
        import_module(package)

    return {"gguf_file": gguf_file}


def read_config(name: str, gguf: dict[str, Any]) -> PreTrainedConfig:
    """The config of a target; that of an adapter is its base's.

    Raises:
        [`CheckpointError`]: its GGUF file cannot be read, or it is no model that Transformers knows.
    """
    try:
        return AutoConfig.from_pretrained(base_of_adapter(name) or name, **gguf)
    except _UNREADABLE as error:
        said = " ".join(str(error).split())[:300].rstrip(".")
        if not gguf:
            raise CheckpointError(
                f"`{name}` must hold a model that Transformers knows, but: {said}. Check the path, or update "
                "Transformers."
            ) from error

        raise CheckpointError(
            f"`{gguf['gguf_file']}` of `{name}` must be a GGUF file that Transformers can read, but: {said}. Take a "
            "whole file, of a kind that it knows."
        ) from error


def load_weights(name: str, config: PreTrainedConfig, gguf: dict[str, Any], **options: Any) -> PreTrainedModel:
    """Load a target with the `options` of `from_pretrained`; weights of a GGUF file come unpacked and can be saved."""
    if gguf:
        options["quantization_config"] = GgufConfig(dequantize=True)

    target: PreTrainedModel = target_class(config, name).from_pretrained(name, **gguf, **options).eval()
    if gguf:
        target.config._name_or_path = name  # not the title in the file

    return target
