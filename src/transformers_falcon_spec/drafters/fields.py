"""Fields that configurations of drafters share: what follows from the target, and a check of names."""

from dataclasses import fields
from typing import Any

from transformers import PreTrainedModel

from ..errors import OptionError
from .contract import FIELD, TargetContract

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def target_fields(target: PreTrainedModel) -> dict[str, Any]:
    """What a drafter's config copies from its target, so that both fit and stock code finds the special ids."""
    config = target.config.get_text_config(decoder=True)
    fields = {name: getattr(config, name, None) for name in _SPECIAL_IDS}
    fields["vocab_size"] = config.vocab_size
    fields["target_name_or_path"] = target.config._name_or_path
    return fields


def contract_fields(target: PreTrainedModel) -> dict[str, Any]:
    """The same with the contract, for drafters that learn from one target."""
    return {**target_fields(target), FIELD: TargetContract.of(target).to_json()}


def check_fields(config_class: type, options: dict[str, Any]) -> None:
    """Refuse options that are no fields of a configuration.

    Raises:
        [`OptionError`]: at least one is none.
    """
    unknown = sorted(set(options) - {field.name for field in fields(config_class)})
    if unknown:
        raise OptionError(f"`{config_class.__name__}` has no option {', '.join(f'`{name}`' for name in unknown)}.")
