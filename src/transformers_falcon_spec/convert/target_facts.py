"""What a converter knows of the target: from `--target` alone, whose config is read and whose weights are not."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..drafters.config_fields import target_fields
from ..errors import CheckpointError, DrafterMismatchError, OptionError
from ..generation.model_parts import embedding_width, head_width


@dataclass(frozen=True)
class TargetFacts:
    """Sizes and special ids of a target.

    Args:
        fields (`dict`): What the config of every drafter copies from its target.
        hidden_size (`int`): Width of its hidden states.
        head_size (`int`): Width of what its head reads.
        embedding_size (`int`): Width of its token embeddings.
        num_layers (`int`): Layers of its decoder.
    """

    fields: dict[str, Any]
    hidden_size: int
    head_size: int
    embedding_size: int
    num_layers: int


def read_target(name: str) -> TargetFacts:
    """The facts of a target, from its config.

    Raises:
        [`OptionError`]: there is no config of a causal language model at `name`.
    """
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
    """Vocabulary, special ids and name of the target: those of `--target`, else what the foreign config says of them.

    Raises:
        [`DrafterMismatchError`]: config and `--target` have different vocabularies.
        [`CheckpointError`]: neither says how large the vocabulary is.
    """
    size = config.get("vocab_size")
    if target is not None:
        if size is not None and size != target.fields["vocab_size"]:
            raise mismatch("a vocabulary", size, target.fields["vocab_size"], target)
        return target.fields
    if size is None:
        raise needs_target("how large the vocabulary is")
    ids = {field: config.get(field) for field in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"vocab_size": size, "target_name_or_path": name or None, **ids}


def check_size(what: str, expected: int, found: int, target: TargetFacts) -> None:
    """Refuse a target of another size than the drafter was made for.

    Raises:
        [`DrafterMismatchError`]: with both sizes.
    """
    if expected != found:
        raise mismatch(what, expected, found, target)


def mismatch(what: str, expected: int, found: int, target: TargetFacts) -> DrafterMismatchError:
    """A target that the drafter was not made for."""
    return DrafterMismatchError(
        f"This drafter expects {what} of size {expected}, but the target `{target.fields['target_name_or_path']}` gives "
        f"{found}. Name the target it was trained for: `--target`."
    )


def needs_target(what: str) -> CheckpointError:
    """A source that leaves open what only the target tells."""
    return CheckpointError(
        f"A conversion must know {what}, but the source does not say it. Name the target that the drafter was trained "
        f"for, a folder or Hub id: `--target NAME`. Only its config is read."
    )
