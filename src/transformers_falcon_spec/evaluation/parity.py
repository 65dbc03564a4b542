"""Is the text the target's own? Token for token, and where it is not: a proven tie, or a bug."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .decoding import Options, timed_generate
from .prompts import Prompt

TIE_FACTOR = 4  # a gap of at most this many times the difference in logits is a tie


@dataclass(frozen=True)
class ParityResult:
    """One prompt's outcome.

    Args:
        verdict (`str`): `identical`, `tie` or `different`.
        first_difference (`int`, *optional*): Index of the first new token that differs.
        gap (`float`, *optional*): Between the target's best two logits there, decoding alone.
        rounding (`float`, *optional*): Largest difference there between its logits alone and in the tree.
        decoding (`str`, *optional*): A name for the options, for those who check several.
    """

    prompt_id: str
    set_name: str
    num_tokens: int
    verdict: str
    first_difference: int | None = None
    gap: float | None = None
    rounding: float | None = None
    decoding: str = ""


def check_parity(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel,
    prompt: Prompt,
    options: Options,
    max_new_tokens: int = 128,
    seed: int = 0,
) -> ParityResult:
    """Write one text with and without the drafter, from the same seed, and compare.

    A difference is a tie when the gap between the target's best two logits at the first differing token is at most
    four times the largest difference between its logits there without and with the tree, and that difference is no
    larger than rounding explains.
    """
    ids = prompt.input_ids(tokenizer)
    plain, drafted = (
        timed_generate(target, ids, max_new_tokens, options, seed, assistant) for assistant in (None, drafter)
    )
    result = partial(ParityResult, prompt.prompt_id, prompt.set_name)
    if plain.new_ids == drafted.new_ids:
        return result(num_tokens=len(plain.new_ids), verdict="identical")
    pairs = zip(plain.new_ids, drafted.new_ids, strict=False)
    shorter = min(len(plain.new_ids), len(drafted.new_ids))
    place = next((index for index, (left, right) in enumerate(pairs) if left != right), shorter)
    gap, rounding, is_rounding = _tie(target, ids, place, options, seed, drafter)
    verdict = "tie" if gap <= TIE_FACTOR * rounding and is_rounding else "different"
    return result(num_tokens=place, verdict=verdict, first_difference=place, gap=gap, rounding=rounding)


def _tie(
    target: PreTrainedModel, ids: Tensor, place: int, options: Options, seed: int, drafter: PreTrainedModel
) -> tuple[float, float, bool]:
    """Gap of the best two plain logits at a place, largest difference to the tree's there, and whether that is rounding.

    Rounding is a difference of at most the root of the type's precision, relative to the logits.
    """
    plain, drafted = (
        timed_generate(target, ids, place + 1, options, seed, assistant, output_logits=True).output.logits[place]
        for assistant in (None, drafter)
    )
    best = plain[0].topk(2).values
    rounding = float((plain - drafted).abs().max())
    limit = torch.finfo(target.dtype).eps ** 0.5 * float(plain.abs().max())
    return float(best[0] - best[1]), rounding, rounding <= limit
