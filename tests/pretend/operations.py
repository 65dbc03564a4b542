"""Operations that PyTorch has no form of for a pretended device, as one operation each."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_attention = functional.scaled_dot_product_attention
_lstm = torch._VF.lstm
_rms_norm = functional.rms_norm


@torch.library.custom_op("pretend::attention", mutates_args=())
def _attention_op(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    found: Tensor = _attention(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=gqa)
    return found


@torch.library.custom_op("pretend::rms_norm", mutates_args=())
def _rms_norm_op(states: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    return _rms_norm(states, shape, weight, eps)


@torch.library.custom_op("pretend::lstm", mutates_args=())
def _lstm_op(
    data: Tensor, states: list[Tensor], weights: list[Tensor], bias: bool, layers: int, batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    found = _lstm(data, states, weights, bias, layers, 0.0, False, False, batch_first)
    return tuple(each.clone() for each in found)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """In the place of `torch.nn.functional.scaled_dot_product_attention`."""
    assert dropout_p == 0.0
    is_causal, scale, gqa = (options.get(name) for name in ("is_causal", "scale", "enable_gqa"))
    return torch.ops.pretend.attention(query, key, value, attn_mask, bool(is_causal), scale, bool(gqa))


def rms_norm(
    states: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """In the place of `torch.nn.functional.rms_norm`, which is one kernel on CUDA and many operations on a CPU."""
    return torch.ops.pretend.rms_norm(states, list(normalized_shape), weight, eps)


def lstm(data: Tensor, *args: Any) -> Any:
    """In the place of `torch._VF.lstm`, for rows of one length."""
    states, weights, bias, layers, _dropout, is_training, is_bidirectional, batch_first = args
    assert (is_training, is_bidirectional) == (False, False)
    return torch.ops.pretend.lstm(data, [*states], [*weights], bias, layers, batch_first)
