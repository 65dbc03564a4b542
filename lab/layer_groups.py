"""Divides an EasySpec drafter's layers into groups that attend at once."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from transformers_falcon_spec.drafters.easyspec import Backend

Groups = list[list[int]]


class LayerByLayer(Backend):
    """The layers of a group one after another: what the fused backend is held against, and what needs no new weights."""

    def attend(self, number: int, states: Tensor, inputs: Any) -> Sequence[Tensor]:
        """Attention outputs `[rows, tokens, hidden]` of a group's layers, all over the same `states`."""
        return [self.layered.attend(index, states, inputs) for index in self.groups[number]]


def in_order(drafter: Any) -> Any:
    """The drafter, whose groups attend layer by layer from now on."""
    drafter.backend = lambda: LayerByLayer(drafter.layered, drafter.config.layer_groups)
    return drafter


def with_group(num_layers: int, start: int = 0, size: int = 1) -> Groups:
    """One group of `size` layers from `start`, and all other layers alone."""
    layers = [[layer] for layer in range(num_layers)]
    return [*layers[:start], list(range(start, start + size)), *layers[start + size :]]


def candidate_groups(num_layers: int, max_size: int) -> list[tuple[int, int]]:
    """Start and size of every group of 2 to `max_size` layers between the first and the last one."""
    return [(start, size) for size in range(2, max_size + 1) for start in range(1, num_layers - size)]


def best_divisions(num_layers: int, losses: Mapping[tuple[int, int], float]) -> list[Groups]:
    """The division of the layers that loses least, for each possible number of groups, most groups first.

    The loss of a division is estimated by the sum of what its groups lose alone.

    Args:
        num_layers (`int`): Layers of the model; the first and the last one stay alone.
        losses (`Mapping`): The loss of each candidate group, by start and size; a layer alone loses nothing.
    """
    pieces = dict(losses)
    for layer in range(1, num_layers - 1):
        pieces[layer, 1] = 0.0

    best: dict[int, dict[int, tuple[float, Groups]]] = {1: {0: (0.0, [])}}  # by next layer and number of groups
    for end in range(2, num_layers):
        found: dict[int, tuple[float, Groups]] = {}
        for (start, size), loss in pieces.items():
            if start + size == end:
                for num, (before, groups) in best[start].items():
                    option = (before + loss, [*groups, list(range(start, end))])
                    found[num + 1] = min(found.get(num + 1, option), option)

        best[end] = found

    divisions = sorted(best[num_layers - 1].items(), reverse=True)
    return [[[0], *groups, [num_layers - 1]] for _, (_, groups) in divisions]
