"""The mask token of a diffusion model: found by its string, for its id may be a word of the target."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...errors import DrafterMismatchError, OptionError


def mask_id(
    config: PreTrainedConfig,
    options: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
) -> int:
    """The id of the mask: as asked for, else that of the tokenizer's own mask token, else that of the configuration.

    Raises:
        [`OptionError`]: nobody names one.
        [`DrafterMismatchError`]: the tokenizer says that another token is the mask.
    """
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
    """Refuse a mask that is a word of the target.

    Raises:
        [`DrafterMismatchError`]: it is one, or nobody can say.
    """
    if target_tokenizer is None:
        if mask_token_id < num_shared:
            raise DrafterMismatchError(
                f"The mask must be no token of the target, but `mask_token_id` {mask_token_id} is below {num_shared}, "
                "the ids that both share, and the target brings no tokenizer that could tell. Pass `tokenizer=..., "
                "target_tokenizer=...`, or `mask_is_text=True` if the model was trained with a word as its mask: that "
                "word is never drafted."
            )
        return
    theirs = {number: token for token, number in target_tokenizer.get_vocab().items()}.get(mask_token_id)
    is_mask = theirs is not None and theirs == target_tokenizer.mask_token
    if theirs is not None and not is_mask:
        ours = None if tokenizer is None else tokenizer.convert_ids_to_tokens(mask_token_id)
        raise DrafterMismatchError(
            f"The mask must be no token of the target, but id {mask_token_id}, {ours!r} in the diffusion model, is "
            f"{theirs!r} there. Take a diffusion model of the target's own family, or pass `mask_is_text=True` if it "
            "was trained with that word as its mask: it is never drafted then."
        )
