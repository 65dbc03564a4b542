"""Facts about the target of a converted drafter: its config, and weights of which a source may bring copies."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
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


def weight_of(target: PreTrainedModel, part: nn.Module) -> Tensor | None:
    """The weight of a part of the target, from its files where it is not loaded; None where it lies nowhere here."""
    weight: Any = getattr(part, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():  # quantised, so without values to compare
        return None
    if not weight.is_meta:
        return weight.detach()

    names = {name for name, each in target.named_parameters(remove_duplicate=False) if each is weight}
    ends = {tuple(name.split(".")[-2:]) for name in names}
    for path in _weight_files(target.config._name_or_path):
        try:
            with safe_open(path, framework="pt") as stored:
                for key in stored.keys():  # noqa: SIM118  it is no dictionary
                    if tuple(key.split(".")[-2:]) in ends:
                        return stored.get_tensor(key)
        except (SafetensorError, OSError):  # of the target alone, which loading it says better
            continue
    return None


def _weight_files(name: str) -> list[Path]:
    """The safetensors files of a model in a folder, or of what the Hub's cache holds of it; nothing is fetched."""
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (OSError, HFValidationError):
            return []
    return sorted(folder.glob("*.safetensors"))


def is_same_weight(one: Tensor, other: Tensor) -> bool:
    """Whether two weights are equal but for the rounding of the type of either."""
    if one.shape != other.shape:
        return False
    coarsest = max(torch.finfo(each.dtype).eps for each in (one, other))
    is_rounded = coarsest > torch.finfo(torch.float32).eps
    smallest = 1e-6 if is_rounded else 0.0  # below it float16 rounds to few values
    first, second = (each.to("cpu", torch.float32) for each in (one, other))
    return torch.allclose(first, second, rtol=coarsest, atol=smallest)


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
        f"for, a folder or Hub id: `--target NAME`."
    )
