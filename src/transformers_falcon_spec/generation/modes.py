"""What calls change in models while they run, such as the eval mode of drafters; a target's train mode is checked."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..errors import GenerationError
from .model_parts import cuda_devices, device_of, named

T = TypeVar("T")
_LOCK = threading.Lock()


@dataclass
class _Change:
    """An attribute that running calls have changed: its owner, its value before them, and these calls."""

    owner: Any
    before: Any
    calls: set[object] = field(default_factory=set)


_CHANGES: dict[tuple[int, str], _Change] = {}  # by id of the owner and name


def attribute_set(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """Set an attribute for the time of the block; the last of overlapping calls gives the old value back."""
    return _all_set([owner], name, value)


def in_eval_mode(drafter: Any) -> AbstractContextManager[None]:
    """Set every part of `drafter` to eval mode, as dropout would weaken drafts and draw from the global stream.

    Parts that are in eval mode by themselves are left alone, as another thread may train them meanwhile.
    """
    parts = getattr(drafter, "modules", list)
    found = (part for part in parts() if part.training or (id(part), "training") in _CHANGES)  # once it is their turn
    return _all_set(found, "training", False)  # not `eval()`: some modules do more in that, such as merging adapters


@contextmanager
def _all_set(owners: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Set an attribute of all owners. An interrupt between any two lines leaves nothing of the call."""
    call = object()
    # the lock is held in one line, so that nothing comes before its release
    try:
        try:
            with _LOCK: _set(owners, name, value, call)  # fmt: skip  # noqa: E701
            yield
        finally:
            with _LOCK: _give_back(call)  # fmt: skip  # noqa: E701
    finally:
        with _LOCK: _give_back(call)  # fmt: skip  # noqa: E701  once more, as the first time may have been interrupted


def _set(owners: Iterable[Any], name: str, value: Any, call: object) -> None:
    for owner in owners:
        change = _CHANGES.setdefault((id(owner), name), _Change(owner, getattr(owner, name)))
        change.calls.add(call)
        if getattr(owner, name) != value:
            setattr(owner, name, value)


def _give_back(call: object) -> None:
    """Take a call out, and give back what no other call needs; once more changes nothing."""
    for (number, name), change in list(_CHANGES.items()):
        change.calls.discard(call)
        if change.calls:
            continue
        if getattr(change.owner, name) != change.before:
            setattr(change.owner, name, change.before)
        _CHANGES.pop((number, name))


@contextmanager
def variable_set(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a variable of this thread for the time of the block, with the same promise."""
    before = variable.get()
    try:
        try:
            variable.set(value)
            yield
        finally:
            variable.set(before)
    finally:
        variable.set(before)  # once more, as above


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
