"""What calls change in models while they run, such as the eval mode of drafters; a target's train mode is checked."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import GenerationError
from .model_parts import cuda_devices, device_of, named

_LOCK = threading.Lock()
_BEFORE: dict[tuple[int, str], tuple[Any, int]] = {}  # by id of the owner and name: the old value, and running calls


@contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for the time of the block; the last of overlapping calls gives the old value back."""
    key = (id(owner), name)
    with _LOCK:
        before, num_calls = _BEFORE.get(key, (getattr(owner, name), 0))
        _BEFORE[key] = before, num_calls + 1
        if not num_calls and value != before:
            setattr(owner, name, value)
    try:
        yield
    finally:
        with _LOCK:
            before, num_calls = _BEFORE.pop(key)
            if num_calls > 1:
                _BEFORE[key] = before, num_calls - 1
            elif getattr(owner, name) != before:
                setattr(owner, name, before)


@contextmanager
def in_eval_mode(drafter: Any) -> Iterator[None]:
    """Set every part of `drafter` to eval mode, as dropout would weaken drafts and draw from the global stream."""
    find = getattr(drafter, "modules", None)
    with _LOCK:  # parts that are in eval mode by themselves are left alone, as another thread may train them meanwhile
        parts = [part for part in (find() if find else ()) if part.training or (id(part), "training") in _BEFORE]
    with ExitStack() as changes:
        for part in parts:  # not `eval()`: some modules do more in that, such as merging adapters
            changes.enter_context(attribute_set(part, "training", False))
        yield


@torch.no_grad()
def check_target_mode(model: PreTrainedModel) -> None:
    """Raise an error for a target in train mode that recomputes activations, without a cache, or uses dropout."""
    training = [part for part in model.modules() if part.training]
    if not training:
        return
    if any(getattr(part, "gradient_checkpointing", False) for part in training):
        raise GenerationError(
            f"Speculative decoding needs the target's cache, but {named(model)} is in train mode and recomputes its "
            "activations (gradient checkpointing), so that it keeps none. Call `target.eval()` before, and "
            "`target.train()` after it."
        )
    if _draws(model):
        raise GenerationError(
            f"A target must read a text the same way each time, but {named(model)} is in train mode and draws from "
            "the random stream (dropout): no tree of tokens reads as those tokens one by one. Call `target.eval()` "
            "before, and `target.train()` after it."
        )


def _draws(model: PreTrainedModel) -> bool:
    devices = cuda_devices(model)
    with torch.random.fork_rng(devices=devices):
        before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        model(input_ids=torch.arange(2, device=device_of(model))[None], use_cache=False)
        after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    return not all(map(torch.equal, before, after))
