"""Forward hooks that catch the target's hidden states, the features that drafters read, while the target reads."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import TargetError

_NUM_DIMS = 3  # rows, tokens, width


class FeatureHooks:
    """Keeps hidden states of the target: 0 are the embeddings, i is the output of layer i, -1 what the head reads."""

    def __init__(self, decoder: nn.Module, num_layers: int, feature_layers: Sequence[int]) -> None:
        self.feature_layers = tuple(feature_layers)
        self._decoder = decoder
        lists = (part for part in decoder.modules() if isinstance(part, nn.ModuleList))
        self._layers = next((part for part in lists if len(part) == num_layers), nn.ModuleList())
        inner = [layer for layer in self.feature_layers if layer != -1]
        if inner and len(self._layers) != num_layers:
            raise TargetError(
                f"Features of layers {inner} need a list of {num_layers} decoder layers; the target has none. Read -1 "
                "alone, what the head reads."
            )

        if any(not 0 <= layer < num_layers for layer in inner):
            raise TargetError(
                f"Feature layers must be -1 or lie in 0..{num_layers - 1}, but they are {self.feature_layers}."
            )

        self._caught: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._registered, self._is_active = ExitStack(), False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Register the hooks for the time of the block."""
        self.discard()
        self._is_active = True
        try:
            with self._registered:
                self._register()
                yield
        finally:
            self._is_active = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the hooks away for the time of the block, for forwards that would be compiled with them."""
        self._registered.close()
        try:
            yield
        finally:
            if self._is_active:
                self._register()

    def _register(self) -> None:
        for layer in set(self.feature_layers):
            self._registered.enter_context(self._hook(layer, threading.get_ident()))

    def _hook(self, layer: int, owner: int) -> RemovableHandle:
        """Register one hook, which ignores other threads, as they may use the same model at the same time."""

        def keep(states: Any) -> None:
            if threading.get_ident() == owner:
                self._caught[layer].append(states if isinstance(states, Tensor) else states[0])

        if layer == 0:
            return self._layers[0].register_forward_pre_hook(
                lambda _module, args, kwargs: keep(args or kwargs["hidden_states"]), with_kwargs=True
            )
        part = self._decoder if layer == -1 else self._layers[layer - 1]
        return part.register_forward_hook(lambda _module, _inputs, output: keep(output))

    def take(self, num_tokens: int) -> Tensor | None:
        """The features kept since the last call, `[rows, num_tokens, feature_dim]`; None without `feature_layers`."""
        if not self.feature_layers:
            return None
        caught = self._caught
        self.discard()
        parts = []
        for layer in self.feature_layers:
            parts.append(_joined(caught[layer], layer, num_tokens))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.to(parts[-1].device) for part in parts], dim=-1)

    def discard(self) -> None:
        """Forget the features kept since the last call of `take`: processors may run the target, as guidance does."""
        self._caught = defaultdict(list)


def _joined(caught: list[Tensor], layer: int, num_tokens: int) -> Tensor:
    num_seen = 0
    for part in caught:
        if part.dim() != _NUM_DIMS:
            raise TargetError(
                f"Hidden state {layer} must be of shape [rows, tokens, hidden size], but the target gives "
                f"{tuple(part.shape)}. Read -1 alone, what the head reads; a kind of drafter that needs other layers "
                "does not fit this target."
            )
        num_seen += part.shape[1]

    if not caught or num_seen != num_tokens:
        seen = f"{num_seen} tokens" if caught else "nothing"
        raise TargetError(
            f"The hook at hidden state {layer} must see {num_tokens} tokens, but it saw {seen}. "
            "A compiled target may skip hooks: pass the model before `torch.compile`."
        )
    return torch.cat(caught, dim=1)
