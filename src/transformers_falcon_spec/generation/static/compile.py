"""The target's forward through `torch.compile`, with the features that drafters read among its outputs."""

from collections.abc import Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

MOST_SHAPES = 128  # for which one forward is compiled; by itself Dynamo stops at 8, and goes on eagerly without a word


class CompiledForward:
    """The forward of a model, compiled once for each shape in which it is called.

    It holds neither the model nor its weights. [`compiled_forward`] makes it.
    """

    def __init__(self, backend: str) -> None:
        own = FunctionType(_read.__code__.replace(), globals())  # what Dynamo compiles lives as long as this code
        self._read: Any = torch.compile(own, backend=backend, dynamic=False)

    def __call__(
        self, model: PreTrainedModel, feature_layers: Sequence[int], inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits `[rows, nodes, vocab]` and features `[rows, nodes, feature_dim]`; None without `feature_layers`.

        Hooks of the model do not fire. Shapes are those of all tensors in `inputs`, the buffers of the cache included.
        """
        limits = {"cache_size_limit": MOST_SHAPES, "accumulated_cache_size_limit": MOST_SHAPES}
        with torch._dynamo.config.patch(limits):
            return self._read(model, tuple(feature_layers), inputs)


def compiled_forward(model: PreTrainedModel, backend: str = "inductor") -> CompiledForward:
    """The compiled forward of a model, the same in every call; it goes with the model."""
    by_backend = _COMPILED.setdefault(model, {})
    if backend not in by_backend:
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                maybe_install_capturing_hooks(part)  # otherwise the first forward does, which cannot be compiled then
        by_backend[backend] = CompiledForward(backend)
    return by_backend[backend]


def _read(model: Any, feature_layers: tuple[int, ...], inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    outputs = model.forward(**inputs, output_hidden_states=bool(feature_layers), return_dict=True)
    features = [outputs.hidden_states[layer] for layer in feature_layers]
    return outputs.logits, torch.cat(features, dim=-1) if features else None


_COMPILED: WeakKeyDictionary[PreTrainedModel, dict[str, CompiledForward]] = WeakKeyDictionary()
