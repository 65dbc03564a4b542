"""Fields that configurations of drafters share: what follows from the target, and a check of names."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import OptionError
from ..generation.model_parts import check_takes_back
from ..generation.text_limits import scaled_context
from ..provenance import portable
from .fingerprint import FIELD, TargetFingerprint

_NAMES = ("target_name_or_path", "_name_or_path")  # of models, whose folders other machines do not have
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def target_fields(target: PreTrainedModel) -> dict[str, Any]:
    """Fields that a drafter's config copies from its target: vocabulary, special ids and name."""
    check_takes_back(target)
    config = target.config.get_text_config(decoder=True)
    special = {name: getattr(config, name, None) for name in _SPECIAL_IDS}
    return {**special, "vocab_size": config.vocab_size, "target_name_or_path": target.config._name_or_path}


def trained_target_fields(target: PreTrainedModel) -> dict[str, Any]:
    """The copied fields and the target's fingerprint, for drafters that are trained for one target."""
    return {**target_fields(target), FIELD: TargetFingerprint.of_target(target).to_json()}


def own_fields(config_class: Any) -> set[str]:
    """Names of the fields that a drafter's configuration has besides those of every configuration."""
    return {field.name for field in fields(config_class)} - {field.name for field in fields(PreTrainedConfig)}


def check_fields(config_class: type, options: dict[str, Any]) -> None:
    """Refuse options that are no fields of a configuration: [`OptionError`]."""
    unknown = sorted(set(options) - {field.name for field in fields(config_class)})
    if unknown:
        raise OptionError(f"`{config_class.__name__}` has no option {', '.join(f'`{name}`' for name in unknown)}.")


def check_least(config: Any, least: Mapping[str, int]) -> None:
    """Refuse numbers of a configuration that are smaller than the least of their name: [`OptionError`]."""
    for name, smallest in least.items():
        value = getattr(config, name)
        if value is not None and value < smallest:
            raise OptionError(f"`{name}` must be at least {smallest}, but it is {value}.")


def name_portably(folder: Path) -> None:
    """Remove this machine's paths from the names of models in a drafter's `config.json`, wrapped models included."""
    path = folder / "config.json"
    stored = path.read_text(encoding="utf-8")
    path.write_text(json.dumps(_named(json.loads(stored)), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _named(config: dict[str, Any]) -> dict[str, Any]:
    inner = {name: _named(value) for name, value in config.items() if isinstance(value, dict)}
    return {**config, **inner, **{name: portable(config[name]) for name in _NAMES if name in config}}


def context_of(config: Any) -> int | None:
    """The longest text that a model is made for, as its positions are scaled; None where nothing limits it."""
    return scaled_context(config.get_text_config(decoder=True))
