"""Converting public masked diffusion models to a [`DiffusionDrafter`] around a stock model of Transformers.

All of them were made of autoregressive models and keep their layers: with a mask of who sees whom a stock model
computes the same logits. Their own code is never run. Source: `modeling_dream.py` of ZHZisZZ/dllm, NVlabs/Fast-dLLM.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..drafters.config_fields import own_fields
from ..drafters.diffuspec import DiffusionDrafter
from ..drafters.whole_model import tokenizer_of
from ..errors import CheckpointError, DrafterMismatchError
from ..generation.model_parts import named
from .conversion import Conversion, rename_weights
from .formats import shortened
from .llama_layers import layer_fields
from .source import Checkpoint
from .target_facts import needs_target
from .vocabulary import read_vocabulary

_PREFIX = "model."  # of the wrapped model's weights in a drafter
# Fields that only describe windows, which the models' own code does not obey: all of their layers see the whole text.
_WINDOWS = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}


@dataclass(frozen=True)
class Family:
    """What differs between diffusion models of several makers."""

    stock: str  # the `model_type` of the class of Transformers that has the same layers
    options: dict[str, Any] = field(default_factory=dict)  # fields of `DiffusionConfig`


FAMILIES = {"Dream": Family("qwen2", {"attention": "full", "logits_shift": 1})}  # by `model_type`


def convert_diffusion(checkpoint: Checkpoint, target: PreTrainedModel | None) -> Conversion:
    """Convert a masked diffusion model to a drafter for `target`, whose tokens it must have."""
    family = FAMILIES[checkpoint.config["model_type"]]
    if target is None:
        raise needs_target("which tokens the target has")
    tokenizer = read_vocabulary(checkpoint.folder)
    theirs = tokenizer_of(target.config._name_or_path)
    if tokenizer is None or theirs is None:
        whose = f"`{checkpoint.name}`" if tokenizer is None else f"the target {named(target)}"
        raise DrafterMismatchError(
            f"A diffusion model must have its target's tokens, which are compared, but {whose} brings no tokenizer. "
            "Put the files of its tokenizer beside its weights, and load the target by the name of that folder."
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_stock_config(checkpoint, family))
    weights = _weights(checkpoint, model)
    options = {**family.options, "mask_token_id": _mask(checkpoint, tokenizer)}
    drafter = DiffusionDrafter.wrap(model, target, tokenizer=tokenizer, target_tokenizer=theirs, **options)
    return Conversion(DiffusionDrafter, drafter.config, weights)


def _stock_config(checkpoint: Checkpoint, family: Family) -> PreTrainedConfig:
    """The configuration of the stock model of the same layers."""
    config, stock = checkpoint.config, AutoConfig.for_model(family.stock)
    names = own_fields(type(stock)) - _WINDOWS
    given = {name: config[name] for name in names & config.keys()}
    if type(config.get("vocab_size")) is not int:
        raise CheckpointError(
            f"The config of `{checkpoint.name}` must give `vocab_size` as a whole number, but it is "
            f"{config.get('vocab_size')!r}. Fetch its `config.json` again."
        )
    fields = {**layer_fields(config, checkpoint.name), **given}
    fields["rope_parameters"] = layer_fields(config, checkpoint.name)["rope_parameters"]
    return AutoConfig.for_model(family.stock, **{name: value for name, value in fields.items() if name in names})


def _mask(checkpoint: Checkpoint, tokenizer: Any) -> int:
    """The mask that the config names, which `wrap` compares with the tokenizer's, or else the tokenizer's."""
    size, stated = checkpoint.config["vocab_size"], checkpoint.config.get("mask_token_id")
    found = tokenizer.mask_token_id if stated is None else stated
    if type(found) is not int or not 0 <= found < size:
        raise CheckpointError(
            f"The mask of `{checkpoint.name}` must be one of its {size} tokens, but `mask_token_id` of its config is "
            f"{stated!r} and its tokenizer's {tokenizer.mask_token_id}. Fetch both again: they do not belong together."
        )
    return found


def _weights(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, Tensor]:
    """All weights by their names in a drafter; one that two parts share may be stored once."""
    groups: dict[int, list[str]] = {}  # names of one weight, by its identity
    for name, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(value), []).append(name)
    stored = [[name for name in group if name in checkpoint.tensors] or group[:1] for group in groups.values()]
    weights, _ = rename_weights(checkpoint, {name: name for names in stored for name in names})
    apart = [names for names in stored if any(not weights[name].equal(weights[names[0]]) for name in names)]
    if apart:
        raise CheckpointError(
            f"Weights that are one, as `tie_word_embeddings` says, must be equal, but in `{checkpoint.name}` "
            f"{shortened(apart)} are not. Check that config and weights belong together."
        )
    pairs = zip(groups.values(), stored, strict=True)
    return {f"{_PREFIX}{name}": weights[names[0]] for group, names in pairs for name in group}
