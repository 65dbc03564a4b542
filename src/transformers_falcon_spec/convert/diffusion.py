"""Converting public masked diffusion models to a [`DiffusionDrafter`] around a stock model of Transformers.

All of them were made of autoregressive models and keep their layers: with a mask of who sees whom a stock model
computes the same logits. Their own code is never run. Sources: `modeling_dream.py` and `pipelines/a2d` of
ZHZisZZ/dllm, `modeling.py` of Fast-dLLM v2, `model.py` of HKUNLP/DiffuLLaMA.
"""

import logging
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
from .llama_layers import layer_fields, rope_parameters
from .source import Checkpoint
from .target_facts import needs_target
from .vocabulary import read_vocabulary

_PREFIX = "model."  # of the wrapped model's weights in a drafter
# Fields that only describe windows, which the models' own code does not obey: all of their layers see the whole text.
_WINDOWS = {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}
_GPT2_TABLES = ("embed_tokens.weight", "lm_head.weight")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """What differs between diffusion models of several makers."""

    stock: str  # the `model_type` of the class of Transformers that has the same layers
    logits_shift: int = 1  # as `DiffusionConfig` has it
    block_field: str | None = None  # of the config: the size of blocks that see themselves and earlier ones
    needs_block: bool = False  # without one all see all
    mask: int | None = None  # where neither config nor tokenizer names it
    mask_is_text: bool = False  # it was trained with a word as its mask
    prefixes: dict[str, str] = field(default_factory=dict)  # how names of weights begin, by the stock beginning


FAMILIES = {  # by `model_type`
    "Dream": Family("qwen2"),
    "Fast_dLLM_Qwen": Family("qwen2", block_field="bd_size", needs_block=True, mask=151665),
    "a2d-llama": Family("llama", logits_shift=0, block_field="block_size"),
    "a2d-qwen2": Family("qwen2", logits_shift=0, block_field="block_size"),
    "a2d-qwen3": Family("qwen3", logits_shift=0, block_field="block_size"),
    "llama": Family("llama", mask_is_text=True),  # DiffuLLaMA
    "gpt2": Family(  # DiffuGPT
        "gpt2", mask_is_text=True, prefixes={"transformer.wte.": "embed_tokens.", "transformer.": "denoise_model."}
    ),
}


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
    weights = _weights(checkpoint, model, family)
    options = {
        "logits_shift": family.logits_shift,
        "mask_is_text": family.mask_is_text,
        "mask_token_id": _mask(checkpoint, family, tokenizer, model.config.vocab_size),
        **_attention(checkpoint, family),
    }
    drafter = DiffusionDrafter.wrap(model, target, tokenizer=tokenizer, target_tokenizer=theirs, **options)
    return Conversion(DiffusionDrafter, drafter.config, weights)


def _attention(checkpoint: Checkpoint, family: Family) -> dict[str, Any]:
    """Who sees whom: all see all, or blocks of a fixed grid see themselves and earlier ones."""
    size = checkpoint.config.get(family.block_field or "")
    if size is None and not family.needs_block:
        if family.block_field:
            logger.warning(
                "`%s` is taken for a model all of whose tokens see all (MDLM), for its config names no `%s`. If it "
                "was trained in blocks (BD3-LM), say so in the drafter's config: `attention` is `block_causal`, "
                "`block_size` 32.",
                checkpoint.name,
                family.block_field,
            )
        return {"attention": "full"}
    if type(size) is not int or size < 1:
        raise CheckpointError(
            f"The config of `{checkpoint.name}` must give `{family.block_field}`, the size of its blocks, as a "
            f"positive whole number, but it is {size!r}. Fetch its `config.json` again."
        )
    return {"attention": "block_causal", "block_size": size}


def _stock_config(checkpoint: Checkpoint, family: Family) -> PreTrainedConfig:
    """The configuration of the stock model of the same layers."""
    config = checkpoint.config
    names = own_fields(type(AutoConfig.for_model(family.stock))) - _WINDOWS
    given = {name: config[name] for name in names & config.keys()}
    if family.stock == "gpt2":
        sizes = _gpt2_sizes(checkpoint)
    else:
        sizes = {**layer_fields(config, checkpoint.name), **given}
        sizes["rope_parameters"] = rope_parameters(config, checkpoint.name)
    if type(config.get("vocab_size")) is not int or config["vocab_size"] < 1:
        raise CheckpointError(
            f"The config of `{checkpoint.name}` must give `vocab_size` as a positive whole number, but it is "
            f"{config.get('vocab_size')!r}. Fetch its `config.json` again."
        )
    fields = {name: value for name, value in {**given, **sizes}.items() if name in names}
    return AutoConfig.for_model(family.stock, **fields)


def _gpt2_sizes(checkpoint: Checkpoint) -> dict[str, Any]:
    """The sizes of a DiffuGPT; its table of tokens grew by its mask, and the config may not say so."""
    sizes = {name: checkpoint.config.get(name) for name in ("n_embd", "n_head", "n_layer", "n_positions")}
    wrong = {name: size for name, size in sizes.items() if type(size) is not int or size < 1}
    table = next((checkpoint.tensors[name] for name in _GPT2_TABLES if name in checkpoint.tensors), None)
    if wrong or table is None:
        raise CheckpointError(
            f"A DiffuGPT must give its sizes as positive whole numbers and hold one of {_GPT2_TABLES}, but "
            f"`{checkpoint.name}` {f'says {wrong}' if wrong else 'has neither'}. Fetch config and weights again."
        )
    return {**sizes, "vocab_size": len(table)}


def _mask(checkpoint: Checkpoint, family: Family, tokenizer: Any, size: int) -> int:
    """The mask that the config names, which `wrap` compares with the tokenizer's, or else the tokenizer's."""
    stated = checkpoint.config.get("mask_token_id")
    known = (stated, tokenizer.mask_token_id, family.mask)
    found = next((each for each in known if each is not None), None)
    if type(found) is not int or not 0 <= found < size:
        raise CheckpointError(
            f"The mask of `{checkpoint.name}` must be one of its {size} tokens, but it is {found!r}: `mask_token_id` "
            f"of its config is {stated!r}, its tokenizer's {tokenizer.mask_token_id}. Fetch both again, or name it "
            "there."
        )
    return found


def _weights(checkpoint: Checkpoint, model: PreTrainedModel, family: Family) -> dict[str, Tensor]:
    """All weights by their names in a drafter; one that two parts share may be stored once."""
    groups: dict[int, list[str]] = {}  # names of one weight, by its identity
    for name, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(value), []).append(name)
    theirs = {name: _foreign_name(name, family) for group in groups.values() for name in group}
    stored = [
        [theirs[name] for name in group if theirs[name] in checkpoint.tensors] or [theirs[group[0]]]
        for group in groups.values()
    ]
    weights, _ = rename_weights(checkpoint, {name: name for names in stored for name in names})
    apart = [names for names in stored if any(not weights[name].equal(weights[names[0]]) for name in names)]
    if apart:
        raise CheckpointError(
            f"Weights that are one, as `tie_word_embeddings` says, must be equal, but in `{checkpoint.name}` "
            f"{shortened(apart)} are not. Check that config and weights belong together."
        )
    pairs = zip(groups.values(), stored, strict=True)
    return {f"{_PREFIX}{name}": weights[names[0]] for group, names in pairs for name in group}


def _foreign_name(name: str, family: Family) -> str:
    """What the checkpoint calls a weight of the stock model."""
    for ours, theirs in family.prefixes.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name
