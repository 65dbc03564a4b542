"""Are texts those of plain decoding in the same type, and where a 16-bit one is not: did rounding decide between two tokens?"""

from collections.abc import Sequence

import torch

from transformers_falcon_spec.evaluation.parity import (
    GenerateCall,
    ReplayedStep,
    first_difference,
    replay_plain,
)

LOW_PRECISION = (torch.bfloat16, torch.float16)
UNITS = 4  # a near tie: two tokens whose scores are so many units in the last digit of the largest logit apart
VERDICTS = ("identical", "near tie", "different", "not examined")
Texts = list[list[int]]


def verdict(call: GenerateCall | None, plain: Sequence[int], written: Sequence[int]) -> str:
    """Whether a text is the plain one; `call` makes the plain one again, and is None where nothing can."""
    index = first_difference(list(plain), list(written))
    if index is None:
        return VERDICTS[0]
    if call is None:
        return VERDICTS[3]
    if index >= min(len(plain), len(written)) or call.target.dtype not in LOW_PRECISION:
        return VERDICTS[2]
    return _examined(call, plain[: index + 1], written[index])


def _examined(call: GenerateCall, plain: Sequence[int], token_id: int) -> str:
    """What it is that another text has `token_id` where the plain one ends."""
    step = replay_plain(call, len(plain) - 1)
    if step is None or step.noise is None or step.new_ids[:-1] != list(plain[:-1]):
        return VERDICTS[3]  # a row of a batch is rounded otherwise than alone
    return VERDICTS[1] if is_near_tie(step, token_id, call.target.dtype) else VERDICTS[2]


def is_near_tie(step: ReplayedStep, token_id: int, dtype: torch.dtype) -> bool:
    """Whether plain decoding nearly chose this token: its own choice is few units of rounding above."""
    assert step.noise is not None  # of the draw, or ones
    decisive = step.scores.double() - step.noise.double().log()
    unit = torch.finfo(dtype).eps * float(step.scores[step.scores.isfinite()].abs().max())  # the last digit
    return float(decisive[step.token_id] - decisive[token_id]) <= UNITS * unit
