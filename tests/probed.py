"""Answers of the probe, kept for stock targets that are equal: hundreds of tests make the same tiny target anew."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

PROBE = "transformers_falcon_spec.generation.probe"
_ATTENTIONS = ("eager", "sdpa")  # others are functions of tests under any name
_KNOWN: dict[Any, Any] = {}


def known(ask: Callable[[PreTrainedModel, float, bool], Any]) -> Callable[[PreTrainedModel, float, bool], Any]:
    """The probe, which reads with each stock target once for the process: equal classes, configs and weights give equal answers."""

    def answered(model: PreTrainedModel, rounding: float, is_padded: bool) -> Any:
        key = _key(model)
        if key is None:
            return ask(model, rounding, is_padded)

        question = (key, rounding, is_padded)
        if question not in _KNOWN:
            _KNOWN[question] = ask(model, rounding, is_padded)
        return _KNOWN[question]

    return answered


def _key(model: PreTrainedModel) -> Any:
    """What a stock target is made of; `None` where something was put on it or into it."""
    attention = model.config._attn_implementation
    if attention not in _ATTENTIONS or not all(_is_stock(part) for part in model.modules()):
        return None
    switches = (torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), model.config._experts_implementation)
    return type(model), attention, switches, model.config.to_json_string(use_diff=False), *_sums(model)


def _is_stock(part: nn.Module) -> bool:
    has_hooks = part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
    is_plain = not any(hasattr(weight, "__tensor_flatten__") for weight in part.parameters(recurse=False))
    return is_plain and not has_hooks and type(part).__module__.partition(".")[0] in {"torch", "transformers"}


def _sums(model: PreTrainedModel) -> Iterator[Any]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.dtype, tensor.device.type, tensor.double().sum().item()
