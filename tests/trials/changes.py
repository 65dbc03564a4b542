"""What is changed in a target for one call, as callers do: hooks, forwards, attention functions, quantised or offloaded layers."""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from accelerate import cpu_offload, disk_offload
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


@contextmanager
def _hooked(target: Any, steer: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    handle = target.get_input_embeddings().register_forward_hook(lambda _module, _inputs, states: steer(states))
    try:
        yield
    finally:
        handle.remove()


def _fixed_shift(target: Any) -> Tensor:
    weight = target.get_input_embeddings().weight.detach()
    return weight.std() * torch.linspace(-1, 1, weight.shape[-1], dtype=weight.dtype)


def _newest(target: Any) -> Any:
    shift = _fixed_shift(target)
    return _hooked(target, lambda states: torch.cat([states[:, :-1], states[:, -1:] + shift], dim=1))


def _single(target: Any) -> Any:
    shift = _fixed_shift(target)
    return _hooked(target, lambda states: states + shift * (states.shape[1] == 1))


def _every(target: Any) -> Any:
    shift = _fixed_shift(target)
    return _hooked(target, lambda states: states + shift)


def _looking(target: Any) -> Any:
    kept: list[Tensor] = []
    return _hooked(target, kept.append)


@contextmanager
def _mixing_forward(target: Any) -> Iterator[None]:
    embeddings = target.get_input_embeddings()
    stock = embeddings.forward

    def mixing(ids: Tensor) -> Tensor:
        states: Tensor = stock(ids)
        return states + 0.5 * states.mean(dim=1, keepdim=True)

    embeddings.forward = mixing
    try:
        yield
    finally:
        del embeddings.forward


@contextmanager
def _mixing_attention(_target: Any) -> Iterator[None]:
    def mixing(*args: Any, **kwargs: Any) -> Any:
        states, weights = sdpa_attention_forward(*args, **kwargs)
        return states + 0.5 * states.mean(dim=1, keepdim=True), weights

    with patch.dict(AttentionInterface._global_mapping, {"sdpa": mixing}):
        yield


@contextmanager
def _quantised_head(target: Any) -> Iterator[None]:
    head = target.get_output_embeddings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holder = torch.ao.quantization.quantize_dynamic(nn.Sequential(head), {nn.Linear}, dtype=torch.qint8)
    target.set_output_embeddings(holder[0])
    try:
        yield
    finally:
        target.set_output_embeddings(head)


@contextmanager
def _in_memory(target: Any) -> Iterator[None]:
    cpu_offload(target, execution_device=torch.device("cpu"))
    yield


@contextmanager
def _on_disk(target: Any) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        disk_offload(target, folder, execution_device=torch.device("cpu"))
        yield


CHANGES: dict[str, Callable[[Any], Any]] = {
    "newest token steered": _newest,
    "single tokens steered": _single,
    "every token steered": _every,
    "a hook that looks": _looking,
    "a forward that mixes tokens": _mixing_forward,
    "an attention that mixes tokens": _mixing_attention,
    "a head quantised as it reads": _quantised_head,
}
# Weights that come to the device for each forward; targets are made for such a call alone.
OFFLOADS: dict[str, Callable[[Any], Any]] = {"offloaded to memory": _in_memory, "offloaded to a disk": _on_disk}
