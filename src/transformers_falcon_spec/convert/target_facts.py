"""Facts about the target of a converted drafter, read from the config of `--target`; its weights are not read."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..drafters.config_fields import target_fields
from ..errors import CheckpointError, DrafterMismatchError, OptionError
from ..generation.model_parts import embedding_width, head_width

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class TargetFacts:
    """Sizes and special ids of a target."""

    fields: dict[str, Any]  # what the config of every drafter copies from its target
    hidden_size: int
    head_size: int  # width of what its head reads
    embedding_size: int
    num_layers: int


def read_target(name: str) -> TargetFacts:
    """Read the facts of a target from its config."""
    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"`--target` must name a folder or Hub id of a causal language model, but `{name}` is none: {error}"
        ) from error
    text = model.config.get_text_config(decoder=True)
    return TargetFacts(
        fields={**target_fields(model), "target_name_or_path": name},
        hidden_size=text.hidden_size,
        head_size=head_width(model),
        embedding_size=embedding_width(model),
        num_layers=text.num_hidden_layers,
    )


def fields_of(config: dict[str, Any], target: TargetFacts | None, name: str | None) -> dict[str, Any]:
    """Return vocabulary size, special ids and name of the target, from `--target` or else from the foreign config."""
    size = config.get("vocab_size")
    if target is not None:
        if size is not None:
            check_size("a vocabulary", size, target.fields["vocab_size"], target)
        return target.fields
    if size is None:
        raise needs_target("how large the vocabulary is")
    ids = {field: config.get(field) for field in SPECIAL_IDS}
    return {"vocab_size": size, "target_name_or_path": name or None, **ids}


def check_widths(width: int, target: TargetFacts | None, reads_head_input: bool = True) -> None:
    """Check that features and embeddings of the target are as wide as the drafter, which reads both."""
    if target is not None:
        check_size("features", width, target.head_size if reads_head_input else target.hidden_size, target)
        check_size("embeddings", width, target.embedding_size, target)


def check_size(what: str, expected: int, found: int, target: TargetFacts) -> None:
    """Check that the target has a size for which the drafter was made."""
    if expected != found:
        raise DrafterMismatchError(
            f"This drafter expects {what} of size {expected}, but the target `{target.fields['target_name_or_path']}` "
            f"gives {found}. Name the target it was trained for: `--target`."
        )


def needs_target(what: str) -> CheckpointError:
    """Return the error for a checkpoint that lacks a fact which only the target's config can give."""
    return CheckpointError(
        f"A conversion must know {what}, but the source does not say it. Name the target that the drafter was trained "
        f"for, a folder or Hub id: `--target NAME`. Only its config is read."
    )
