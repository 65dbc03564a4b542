"""Train and eval mode during a call: drafters draft in eval mode, and a target that would draw or recompute is refused."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import GenerationError
from .model_parts import cuda_devices, named

_LOCK = threading.Lock()
_HELD: "WeakKeyDictionary[nn.Module, int]" = (
    WeakKeyDictionary()
)  # parts in train mode, and in how many calls they draft


@contextmanager
def in_eval_mode(drafter: Any) -> Iterator[None]:
    """Inside, every part of `drafter` is in eval mode; after the last of the calls that overlap each has its own mode back.

    So nothing is dropped out of a draft, and nothing is drawn from the global random stream for it. A drafter that is no `nn.Module`
    gives its parts as `modules()`, or keeps them in eval mode itself.
    """
    find = getattr(drafter, "modules", None)
    parts = [] if find is None else list(find())
    with _LOCK:
        held = [part for part in parts if part.training or part in _HELD]
        for part in held:
            _HELD[part] = _HELD.get(part, 0) + 1
            part.training = False  # not `eval()`: some modules do more in that, such as merging adapters
    try:
        yield
    finally:
        with _LOCK:
            for part in held:
                _HELD[part] -= 1
                if not _HELD[part]:
                    del _HELD[part]
                    part.training = True


@torch.no_grad()
def check_target_mode(model: PreTrainedModel) -> None:
    """Refuse a target whose train mode changes what it reads; one that reads the same in both modes is served.

    Raises:
        [`GenerationError`]: it keeps no cache, since it recomputes activations, or it draws, as dropout does.
    """
    training = [part for part in model.modules() if part.training]
    if not training:
        return
    if any(getattr(part, "gradient_checkpointing", False) for part in training):
        raise GenerationError(
            f"Speculative decoding needs the target's cache, but {named(model)} is in train mode and recomputes its activations "
            "(gradient checkpointing), so that it keeps none. Call `target.eval()` before, and `target.train()` after it."
        )
    if _draws(model):
        raise GenerationError(
            f"A target must read a text the same way each time, but {named(model)} is in train mode and draws from the random stream "
            "(dropout): no tree of tokens reads as those tokens one by one. Call `target.eval()` before, and `target.train()` after it."
        )


def _draws(model: PreTrainedModel) -> bool:
    """Whether reading two tokens moves the random stream, which is put back."""
    devices = cuda_devices(model)
    ids = torch.arange(2, device=model.device)[None]
    with torch.random.fork_rng(devices=devices):
        before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        model(input_ids=ids, use_cache=False)
        after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    return not all(one.equal(other) for one, other in zip(before, after, strict=True))
