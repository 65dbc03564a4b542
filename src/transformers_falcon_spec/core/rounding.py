"""Which differences rounding explains, of scores computed twice: in another order, or by other kernels."""

from math import inf

import torch
from torch import Tensor

_NUM_ROUNDINGS = 256  # of the largest value ...
_NUM_SHORT_ROUNDINGS = 8  # ... in 16 bits: more of those would be wrong masks, too


def rounding_of(expected: Tensor) -> float:
    """The largest difference from these values that rounding explains; none of whole numbers.

    Up to this difference, which token is best is a tie that rounding breaks.
    """
    if not expected.is_floating_point():
        return 0.0

    info = torch.finfo(expected.dtype)
    finite = expected[expected.isfinite() & (expected > info.min)]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return explained(info.eps, largest)


def explained(eps: float, largest: float) -> float:
    """The largest difference that rounding explains, of values up to `largest` and sums in a type of this `eps`."""
    num_roundings = _NUM_ROUNDINGS if eps <= torch.finfo(torch.float32).eps else _NUM_SHORT_ROUNDINGS
    return num_roundings * eps * largest


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite where one alone is NaN."""
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    errors = (found.double() - expected.double()).abs().masked_fill(is_same, 0.0).nan_to_num(nan=inf)
    return errors.max().item() if errors.numel() else 0.0
