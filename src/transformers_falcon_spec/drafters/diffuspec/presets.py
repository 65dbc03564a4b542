"""What is known of public diffusion models (mask, shift, attention, call), and how the paper drafts. None was run on published weights.

Facts are those of the models' cards, configurations and code as of early 2026. A mask is looked up by its token wherever a
tokenizer names one: an id that is free in one vocabulary is a word of another.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...errors import DrafterMismatchError, OptionError
from .proxy import NgramProxy


@dataclass(frozen=True)
class Preset:
    """Options with which one family drafts.

    Args:
        model_types (`tuple[str, ...]`): Of its configurations, where that tells the family.
        options (`Mapping[str, Any]`): Fields of [`DiffusionConfig`].
        mask_token_id (`int`, *optional*): Where no tokenizer names the mask; None: it must.
        block_field (`str`, *optional*): Field of the configuration with the block that the model was trained for.
        block_size (`int`, *optional*): That block, where no field says it.
        is_text_token (`bool`): The mask is a word of the vocabulary, which is never drafted then.
    """

    model_types: tuple[str, ...]
    options: Mapping[str, Any]
    mask_token_id: int | None = None
    block_field: str | None = None
    block_size: int | None = None
    is_text_token: bool = False


_FULL = {"attention": "full", "logits_shift": 1}
_MASKED_LM = {"auto_class": "AutoModelForMaskedLM", "logits_shift": 0}
PRESETS = {
    "dream": Preset(("Dream",), {**_FULL, "auto_class": "AutoModel"}, 151666),
    "fast_dllm_v2": Preset(
        ("Fast_dLLM_Qwen",),
        {"attention": "block_causal", "logits_shift": 1, "call": "own_grid"},
        151665,
        block_field="bd_size",
        block_size=32,
    ),
    "sdar": Preset(
        ("sdar",),
        {"attention": "block_causal", "logits_shift": 0, "call": "boolean"},
        151669,
        block_field="block_size",
    ),
    "a2d_mdlm": Preset(("a2d-qwen3", "a2d-qwen2", "a2d-llama"), {**_MASKED_LM, "attention": "full"}),
    "a2d_bd3lm": Preset((), {**_MASKED_LM, "attention": "block_causal"}, block_size=32),
    "diffullama": Preset((), _FULL, 811, is_text_token=True),
    "diffugpt_small": Preset((), _FULL, 10541, is_text_token=True),
    "diffugpt_medium": Preset((), _FULL),
    "mdlm": Preset(("mdlm",), {**_MASKED_LM, "attention": "full", "call": "noise_level"}, 50257),
    "bd3lm": Preset(
        ("bd3lm",),
        {**_MASKED_LM, "attention": "block_causal", "call": "sampled"},
        50257,
        block_field="block_size",
    ),
}
# How the paper drafts, with any model (arXiv 2510.02358, section 5): an adaptive length of 20 to 30, and for its search a 3-gram model
# that was fitted to training text.
PAPER = "paper"
PAPER_OPTIONS = {
    "draft_length": "adaptive",
    "min_draft_tokens": 20,
    "num_draft_tokens": 30,
    "growth": 10,
    "smoothing": 0.5,
    "num_steps": 1,
    "search": "cps",
    "mass": 0.8,
    "max_candidates": 15,
    "beam_width": 3,
    "model_weight": 0.5,
}
PAPER_ORDER = 3


def preset_of(name: str | None, config: PreTrainedConfig) -> Preset | None:
    """The preset of that name; without a name the one that the `model_type` tells, or None. `paper` adds the paper's options to that.

    Raises:
        [`OptionError`]: there is no such preset.
    """
    family = next((preset for preset in PRESETS.values() if config.model_type in preset.model_types), None)
    if name is None:
        return family
    if name == PAPER:
        family = family or Preset((), {})
        return replace(family, options={**family.options, **PAPER_OPTIONS})
    if name not in PRESETS:
        raise OptionError(f"`preset` must be one of {sorted([*PRESETS, PAPER])}, but it is {name!r}.")
    return PRESETS[name]


def preset_options(preset: Preset | None, config: PreTrainedConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of [`DiffusionConfig`] for a model of this configuration; those `given` come first.

    Raises:
        [`OptionError`]: the block asked for is larger than the model's.
    """
    if preset is None:
        return dict(given)
    own = None if preset.block_field is None else getattr(config, preset.block_field, None)
    block_size = preset.block_size if own is None else own
    found = {**preset.options, "block_size": block_size}
    found = {field: value for field, value in found.items() if value is not None}
    wanted = given.get("block_size")
    if wanted is not None and block_size is not None and wanted > block_size:
        raise OptionError(
            f"`block_size` must be at most {block_size}, the block that the model was trained for, but it is {wanted}."
        )
    return {**found, **given}


def fitted_proxy(
    name: str | None, texts: Iterable[Sequence[int] | Tensor] | None, vocab_size: int
) -> NgramProxy | None:
    """The proxy that a preset asks for, fitted to training text; None where there is no text.

    Raises:
        [`OptionError`]: the preset is the paper's, and there is no text.
    """
    if name == PAPER and texts is None:
        raise OptionError(
            f"The preset `{PAPER}` needs training text for its {PAPER_ORDER}-gram proxy, but `proxy_texts` is None. Pass "
            "`proxy_texts=[...]`, token ids of the target for each text."
        )
    return None if texts is None else NgramProxy.fit(texts, PAPER_ORDER, vocab_size)


def mask_id(
    config: PreTrainedConfig,
    options: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    preset: Preset | None = None,
) -> int:
    """The id of the mask: as asked for, else that of the tokenizer's own mask token, of the configuration, of the preset.

    Raises:
        [`OptionError`]: nobody names one.
        [`DrafterMismatchError`]: the tokenizer says that another token is the mask.
    """
    named = getattr(tokenizer, "mask_token_id", None)
    of_family = None if preset is None else preset.mask_token_id
    candidates = [options.get("mask_token_id"), named, getattr(config, "mask_token_id", None), of_family]
    found = next((int(candidate) for candidate in candidates if candidate is not None), None)
    if found is None:
        raise OptionError(
            "A diffusion model needs the id of its mask, but neither `mask_token_id`, a tokenizer, its configuration nor a `preset` names "
            "one. Pass `mask_token_id=...`."
        )
    if named is not None and tokenizer is not None and named != found:
        raise DrafterMismatchError(
            f"The mask must be {tokenizer.mask_token!r}, token {named} of the diffusion model's tokenizer, but `mask_token_id` is {found}, "
            f"there {tokenizer.convert_ids_to_tokens(found)!r}. Pass `mask_token_id={named}`, or the tokenizer that the model was trained with."
        )
    return found


def check_mask(
    mask_token_id: int,
    num_shared: int,
    tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Refuse a mask that is a word of the target.

    Args:
        mask_token_id (`int`): The mask.
        num_shared (`int`): Ids, from 0 on, that both models share.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): That of the diffusion model.
        target_tokenizer (`PreTrainedTokenizerBase`, *optional*): That of the target.

    Raises:
        [`DrafterMismatchError`]: it is one, or nobody can say.
    """
    if target_tokenizer is None:
        if mask_token_id < num_shared:
            raise DrafterMismatchError(
                f"The mask must be no token of the target, but `mask_token_id` {mask_token_id} is below {num_shared}, the ids that both share, "
                "and the target brings no tokenizer that could tell. Pass `tokenizer=..., target_tokenizer=...`, or `mask_is_text=True` if "
                "the model was trained with a word as its mask: that word is never drafted."
            )
        return
    theirs = {number: token for token, number in target_tokenizer.get_vocab().items()}.get(mask_token_id)
    is_mask = theirs is not None and theirs == target_tokenizer.mask_token
    if theirs is not None and not is_mask:
        ours = None if tokenizer is None else tokenizer.convert_ids_to_tokens(mask_token_id)
        raise DrafterMismatchError(
            f"The mask must be no token of the target, but id {mask_token_id}, {ours!r} in the diffusion model, is {theirs!r} there. Take a "
            "diffusion model of the target's own family, or pass `mask_is_text=True` if it was trained with that word as its mask: it "
            "is never drafted then."
        )
