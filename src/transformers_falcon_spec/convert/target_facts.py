"""Facts about the target of a converted drafter, read from the config of `--target`; its weights are not read."""

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ..drafters.config_fields import target_fields
from ..drafters.target_class import target_class
from ..errors import CheckpointError, DrafterMismatchError, OptionError
from ..generation.head import head_width
from ..generation.model_parts import embedding_width, named

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_target(name: str) -> PreTrainedModel:
    """Read the config of a target, and make a model of it without weights."""
    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            target = target_class(config, name).from_config(config)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"`--target` must name a folder or Hub id of a causal language model, but `{name}` is none: {error}"
        ) from error
    target.config._name_or_path = name
    return target


def fields_of(config: dict[str, Any], target: PreTrainedModel | None, name: str | None) -> dict[str, Any]:
    """Return vocabulary size, special ids and name of the target, from `--target` or else from the foreign config."""
    size = config.get("vocab_size")
    if size is not None and (type(size) is not int or size < 1):
        raise CheckpointError(
            f"`vocab_size` of the config must be a positive whole number, but it is {size!r}. Fetch the `config.json` "
            "of the drafter itself."
        )
    if target is not None:
        fields = target_fields(target)
        if size is not None:
            check_size("a vocabulary", size, fields["vocab_size"], target)
        return fields
    if size is None:
        raise needs_target("how large the vocabulary is")
    ids = {field: config.get(field) for field in SPECIAL_IDS}
    return {"vocab_size": size, "target_name_or_path": name or None, **ids}


def check_widths(width: int, target: PreTrainedModel | None, reads_head_input: bool = True) -> None:
    """Check that features and embeddings of the target are as wide as the drafter, which reads both."""
    if target is not None:
        hidden_size = target.config.get_text_config(decoder=True).hidden_size
        check_size("features", width, head_width(target) if reads_head_input else hidden_size, target)
        check_size("embeddings", width, embedding_width(target), target)


def check_size(what: str, expected: int, found: int, target: PreTrainedModel) -> None:
    """Check that the target has a size for which the drafter was made."""
    if expected != found:
        raise DrafterMismatchError(
            f"This drafter expects {what} of size {expected}, but the target {named(target)} "
            f"gives {found}. Take the target that it was trained for."
        )


def needs_target(what: str) -> CheckpointError:
    """Return the error for a checkpoint that lacks a fact which only the target's config can give."""
    return CheckpointError(
        f"A conversion must know {what}, but the source does not say it. Name the target that the drafter was trained "
        f"for, a folder or Hub id: `--target NAME`. Only its config is read."
    )
