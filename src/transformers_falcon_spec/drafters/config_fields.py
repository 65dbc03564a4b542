"""The base of drafters' configurations: what follows from the target, and checks of names and values."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import Self

from ..core.options import check_known, check_options, option
from ..generation.model_parts import check_takes_back
from ..generation.text_limits import scaled_context
from ..provenance import portable
from .fingerprint import FIELD, TargetFingerprint

_NAMES = ("target_name_or_path", "_name_or_path")  # of models, whose folders other machines do not have
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@strict
class DrafterConfig(PreTrainedConfig):
    """Base of the configurations of drafters.

    A subclass has a `model_type` and fields of its own, each with a default; [`~core.options.option`] gives a field
    bounds.

    Args:
        vocab_size (`int`, *optional*, defaults to 32000): Size of the target's vocabulary.
        target_name_or_path (`str`, *optional*): The target that the drafter was made for.
    """

    vocab_size: int = option(32000, least=1)
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    target_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse options out of range: [`OptionError`]."""
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Refuse options out of range; subclasses add what options must be to one another."""
        check_options(self)

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """A configuration whose sizes fit `target`; `options` are fields, others an [`OptionError`]."""
        check_fields(cls, options)
        fitting = {**target_fields(target), **cls.sizes_for(target, options)}
        if hasattr(cls, FIELD):
            fitting[FIELD] = TargetFingerprint.of_target(target).to_json()
        return cls(**{**fitting, **options})

    @classmethod
    def sizes_for(cls, target: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """Fields of a subclass that follow from a target; `options` are those that were given."""
        return {}


def target_fields(target: PreTrainedModel) -> dict[str, Any]:
    """Fields that a drafter's config copies from its target: vocabulary, special ids and name."""
    check_takes_back(target)
    config = target.config.get_text_config(decoder=True)
    special = {name: getattr(config, name, None) for name in _SPECIAL_IDS}
    return {**special, "vocab_size": config.vocab_size, "target_name_or_path": target.config._name_or_path}


def own_fields(config_class: Any) -> set[str]:
    """Names of the fields that a drafter's configuration has besides those of every configuration."""
    return _names(config_class) - _names(PreTrainedConfig)


def check_fields(config_class: type, options: dict[str, Any]) -> None:
    """Refuse options that are no fields of a configuration: [`OptionError`]."""
    check_known(config_class.__name__, options, _names(config_class))


def _names(config_class: Any) -> set[str]:
    return {field.name for field in fields(config_class)}


def update_config(folder: Path, **fields: Any) -> None:
    """Write fields into the `config.json` of a drafter's folder, and names of models without this machine's paths."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps(_named(config), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _named(config: dict[str, Any]) -> dict[str, Any]:
    named = dict(config)
    for name, value in config.items():
        if isinstance(value, dict):
            named[name] = _named(value)
        elif name in _NAMES:
            named[name] = portable(value)

    return named


def context_of(config: Any) -> int | None:
    """The longest text that a model is made for, as its positions are scaled; None where nothing limits it."""
    return scaled_context(config.get_text_config(decoder=True))
