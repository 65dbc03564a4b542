"""Which tokens a draft model and its target share. Vocabularies of one family often differ in padding at their end alone."""

from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from ..errors import DrafterMismatchError


def tokenizer_of(name_or_path: Any, **hub: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model's weights; None where there is none, for Transformers would make up an empty one."""
    if not str(name_or_path) or not get_tokenizer_config(name_or_path, **hub):
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name_or_path, **hub)
    return tokenizer


def shared_vocabulary(
    sizes: tuple[int, int], tokenizers: tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]
) -> int:
    """How many ids, from 0 on, mean the same to a draft model and its target.

    Args:
        sizes (`tuple[int, int]`): Rows of the draft model's vocabulary and of the target's.
        tokenizers (`tuple`): Theirs; where one is None only vocabularies of one size are taken for the same.

    Raises:
        [`DrafterMismatchError`]: an id is another token to the target, or nobody can say.
    """
    draft, target = tokenizers
    if draft is None or target is None:
        if sizes[0] != sizes[1]:
            whose = "draft model" if draft is None else "target"
            raise DrafterMismatchError(
                f"The draft model has {sizes[0]} tokens and the target {sizes[1]}, so the tokens must be compared, but the {whose} "
                "brings no tokenizer. Pass both: `tokenizer=..., target_tokenizer=...`."
            )
        return sizes[0]
    theirs = _tokens_by_id(target)
    ours = {number: token for number, token in _tokens_by_id(draft).items() if number < min(sizes)}
    common = [number for number in ours if number in theirs]
    different = min((number for number in common if ours[number] != theirs[number]), default=None)
    if different is not None or not common:
        what = "no id is a token of both" if different is None else _difference(different, ours, theirs)
        raise DrafterMismatchError(
            f"Draft model and target must have the same tokens, but {what}. Take a draft model of the target's family."
        )
    return max(common) + 1


def _difference(number: int, ours: dict[int, str], theirs: dict[int, str]) -> str:
    return f"id {number} is {ours[number]!r} in the draft model and {theirs[number]!r} in the target"


def _tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}
