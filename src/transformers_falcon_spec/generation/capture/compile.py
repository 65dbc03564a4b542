"""Forwards in fixed shapes through `torch.compile`: of the target, features among its outputs, and of drafters."""

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from ...transformers_versions import CACHE
from ..slot_cache import SlotCache

MOST_SHAPES = 128  # for which a function is compiled; by itself Dynamo stops at 8, and goes on eagerly without a word
OPTIONS: dict[str, Any] = {
    "cache_size_limit": MOST_SHAPES,
    "accumulated_cache_size_limit": MOST_SHAPES,
    "allow_rnn": True,  # whose weights are read; a whole one cannot be compiled
}


def compiled_read(
    model: PreTrainedModel, backend: str, feature_layers: Sequence[int], inputs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Logits `[rows, nodes, vocab]` and features `[rows, nodes, feature_dim]`; None without `feature_layers`.

    The forward of the target is compiled once for each number of rows and nodes, and for any number of slots. Hooks of
    the model do not fire.
    """
    for part in model.modules() if model not in _COMPILED else ():
        if isinstance(part, PreTrainedModel):
            maybe_install_capturing_hooks(part)  # otherwise the first forward does, which cannot be compiled then
    masks = inputs["attention_mask"]
    _let_slots_vary(inputs[CACHE], masks.values() if isinstance(masks, dict) else [masks])
    return _call(_read, model, backend, tuple(feature_layers), inputs)


def compiled_call(model: PreTrainedModel, backend: str, name: str, *inputs: Any) -> Any:
    """What a drafter's method of this name gives, compiled as [`compiled_read`]; `bool` inputs are masks of slots."""
    for cache in inputs:
        if isinstance(cache, SlotCache):
            _let_slots_vary(cache, [each for each in inputs if isinstance(each, Tensor) and each.dtype == torch.bool])
    return _call(_run, model, backend, name, inputs)


def _let_slots_vary(cache: SlotCache, masks: Iterable[Tensor]) -> None:
    """Mark the dimensions that grow with the text, for which nothing is compiled anew."""
    for states in (each for layer in cache.layers for each in layer.seen.values()):
        torch._dynamo.maybe_mark_dynamic(states, 2)
    for mask in masks:
        torch._dynamo.maybe_mark_dynamic(mask, mask.dim() - 1)


def _call(function: Callable[..., Any], model: PreTrainedModel, backend: str, name: Any, inputs: Any) -> Any:
    by_name = _COMPILED.setdefault(model, {})
    if (backend, name) not in by_name:
        own = FunctionType(function.__code__.replace(), globals())  # what Dynamo compiles lives as long as this code
        by_name[backend, name] = torch.compile(own, backend=backend, dynamic=False)
    with torch._dynamo.config.patch(OPTIONS):
        return by_name[backend, name](model, name, inputs)


def _read(model: Any, feature_layers: tuple[int, ...], inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    outputs = model.forward(**inputs, output_hidden_states=bool(feature_layers), return_dict=True)
    features = [outputs.hidden_states[layer] for layer in feature_layers]
    return outputs.logits, torch.cat(features, dim=-1) if features else None


def _run(model: Any, name: str, inputs: tuple[Any, ...]) -> Any:
    return getattr(model, name)(*inputs)


_COMPILED: WeakKeyDictionary[PreTrainedModel, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()
