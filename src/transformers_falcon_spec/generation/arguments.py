"""Copies, compares and describes arguments of a model, which may be tensors, containers of tensors or other objects."""

import copy
from typing import Any, TypeGuard

import torch
from torch import Tensor


def snapshot(value: Any) -> Any:
    """A copy of `value`, so that a later step cannot change it."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, dict | list) else value


def is_vector(value: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor of at least one dimension."""
    return isinstance(value, Tensor) and value.dim() > 0


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in `value`, containers included."""
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
    """A few words that describe `value` in an error message."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
