"""Diffusion models that others trained: the mask, a forward that obeys attention masks, and the paper's preset.

The mask is found by its string, for its id may be a word of the target.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...errors import DrafterMismatchError, OptionError
from .calls import ModelCall, visible
from .configuration_diffuspec import DiffusionConfig
from .proxy import NgramProxy

PAPER = "paper"  # arXiv 2510.02358, section 5; its other options are the configuration's own
PAPER_OPTIONS = {"draft_length": "adaptive", "min_draft_tokens": 20, "num_draft_tokens": 30}
PAPER_ORDER = 3
_NEEDED = ("attention_mask", "position_ids")  # arguments that the forward must know
_LEAST_TOKENS = 6  # before and behind the first mask
_SHARE = 1e-4  # of what a token says of itself; less than that is rounding


def preset_options(name: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given and, behind them, those of the preset of that name."""
    if name not in (None, PAPER):
        raise OptionError(
            f"`preset` must be {PAPER!r} or left out, but it is {name!r}. What public models need is listed in "
            "`docs/which_drafter.md`."
        )
    return {**(PAPER_OPTIONS if name == PAPER else {}), **given}


def fitted_proxy(
    preset: str | None, texts: Iterable[Sequence[int] | Tensor] | None, vocab_size: int
) -> NgramProxy | None:
    """A proxy fitted to texts, without which there is none; the paper's preset needs them."""
    if preset == PAPER and texts is None:
        raise OptionError(
            f"The preset `{PAPER}` needs training text for its {PAPER_ORDER}-gram proxy, but `proxy_texts` is None. "
            "Pass `proxy_texts=[...]`, token ids of the target for each text."
        )
    return None if texts is None else NgramProxy.fit(texts, PAPER_ORDER, vocab_size)


def mask_id(config: PreTrainedConfig, options: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The id of the mask: as asked for, else that of the tokenizer, else that of the configuration."""
    named = getattr(tokenizer, "mask_token_id", None)
    candidates = [options.get("mask_token_id"), named, getattr(config, "mask_token_id", None)]
    found = next((int(candidate) for candidate in candidates if candidate is not None), None)
    if found is None:
        raise OptionError(
            "A diffusion model needs the id of its mask, but neither `mask_token_id`, a tokenizer nor its "
            "configuration names one. Pass `mask_token_id=...`."
        )
    if named is not None and tokenizer is not None and named != found:
        raise DrafterMismatchError(
            f"The mask must be {tokenizer.mask_token!r}, token {named} of the diffusion model's tokenizer, but "
            f"`mask_token_id` is {found}, there {tokenizer.convert_ids_to_tokens(found)!r}. Pass "
            f"`mask_token_id={named}`, or the tokenizer that the model was trained with."
        )
    return found


def check_mask(
    mask_token_id: int,
    num_shared: int,
    tokenizer: PreTrainedTokenizerBase | None,
    target_tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Refuse a mask that is a word of the target, or may be one."""
    if target_tokenizer is None:
        if mask_token_id < num_shared:
            raise DrafterMismatchError(
                f"The mask must be no token of the target, but `mask_token_id` {mask_token_id} is below {num_shared}, "
                "the ids that both share, and the target brings no tokenizer to compare. Pass `tokenizer=..., "
                "target_tokenizer=...`, or `mask_is_text=True` if the model was trained with a word as its mask: that "
                "word is never drafted."
            )
        return
    theirs = {number: token for token, number in target_tokenizer.get_vocab().items()}.get(mask_token_id)
    if theirs is not None and theirs != target_tokenizer.mask_token:
        ours = None if tokenizer is None else tokenizer.convert_ids_to_tokens(mask_token_id)
        raise DrafterMismatchError(
            f"The mask must be no token of the target, but id {mask_token_id}, {ours!r} in the diffusion model, is "
            f"{theirs!r} there. Take a diffusion model of the target's own family, or pass `mask_is_text=True` if it "
            "was trained with that word as its mask: it is never drafted then."
        )


def check_forward(model: PreTrainedModel) -> None:
    """Refuse a model whose forward takes no masks or no positions."""
    known = inspect.signature(model.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    missing = [name for name in _NEEDED if name not in known and not takes_all]
    if missing:
        raise OptionError(
            f"`{type(model).__name__}.forward` must take {', '.join(f'`{name}`' for name in _NEEDED)}, but it lacks "
            f"{', '.join(f'`{name}`' for name in missing)}. A diffusion model gets a mask of who sees whom: take one "
            "that reads it."
        )


@torch.no_grad()
def check_attention(model: PreTrainedModel, config: DiffusionConfig, device: torch.device) -> None:
    """Refuse a model that does not attend as configured: a later token is changed, and early rows are compared."""
    if device.type == "meta":
        return
    size = max(_LEAST_TOKENS, config.block_size or 0)
    positions = torch.arange(2 * size, device=device)
    seen = visible(config.attention, size, config.block_size, positions, positions)[None]
    texts = [torch.zeros_like(positions).index_fill(0, positions[-1:], token)[None] for token in (1, 2)]
    first, second = (ModelCall(text, positions[None], seen, None, 2 * size).logits(model)[0] for text in texts)
    changes = (first - second).abs().amax(dim=-1)
    leaks = bool(changes[: size - 1].max() > _SHARE * changes[-1])
    if leaks != (config.attention == "full"):
        raise OptionError(
            f"With `attention={config.attention!r}` the first tokens of a text must{' not' if leaks else ''} see the "
            f"last one, but in a `{type(model).__name__}` they {'do' if leaks else 'do not'}. Choose another "
            '`attention`, or load the model with `attn_implementation="sdpa"`.'
        )
