"""Arguments of a model as plain decoding carries them from step to step: copied, compared and described, tensors or not."""

import copy
from typing import Any, TypeGuard

import torch
from torch import Tensor


def snapshot(value: Any) -> Any:
    """`value` as it is now, should a later step change it in place."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, dict | list) else value


def is_vector(value: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor of at least one dimension."""
    return isinstance(value, Tensor) and value.dim() > 0


def tensors_in(value: Any) -> list[Tensor]:
    """Those in `value`."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in inner for tensor in tensors_in(part)]


def is_same(one: Any, other: Any) -> bool:
    """Whether two inputs are equal, down to the tensors in them."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return one.shape == other.shape and torch.equal(one, other.to(one.device))
    if isinstance(one, dict):
        one, other = list(one.items()), list(other.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def described(value: Any) -> str:
    """What it is, in a few words."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
