"""The naive twin of the fused attention: the layers of a group one after another, each with its own index in the cache."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from transformers_falcon_spec.drafters.easyspec.backends import Backend
from transformers_falcon_spec.drafters.easyspec.families import Inputs

IN_ORDER = "in order"  # the name of this twin, beside those of backends


class LayerByLayer(Backend):
    """Each layer of a group attends by itself."""

    def attend(self, number: int, states: Tensor, inputs: Inputs) -> Sequence[Tensor]:
        """Attention outputs `[rows, tokens, hidden]` of a group's layers, all over the same `states`."""
        return [self.layered.attend(index, states, inputs) for index in self.groups[number]]


def in_order(drafter: Any) -> Any:
    """The drafter, whose groups attend layer by layer from now on."""
    drafter.backend = lambda: LayerByLayer(drafter.layered, drafter.config.layer_groups)
    return drafter


def with_backend(drafter: Any, backend: str) -> Any:
    """The drafter with a backend of its own, or with the twin."""
    if backend == IN_ORDER:
        return in_order(drafter)
    drafter.config.backend = backend
    return drafter
