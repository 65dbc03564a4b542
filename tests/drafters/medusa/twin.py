"""The naive twin of Medusa: one head, one feature and one node at a time, from the stored weights by their names."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tests.reference import path_to


def naive_head(
    weights: Mapping[str, Tensor], number: int, feature: Tensor, target_head: Callable[[Tensor], Tensor]
) -> Tensor:
    """Logits `[vocab]` of one head; weights are those of `state_dict()`."""
    states, layer = feature, 0
    while f"heads.{number}.{layer}.linear.weight" in weights:
        name = f"heads.{number}.{layer}.linear"
        inner = weights[f"{name}.weight"] @ states + weights[f"{name}.bias"]
        states, layer = states + inner / (1 + torch.exp(-inner)), layer + 1
    own = weights.get(f"heads.{number}.{layer}.weight")
    return target_head(states) if own is None else own @ states


def naive_draft(
    weights: Mapping[str, Tensor],
    target_head: Callable[[Tensor], Tensor],
    feature: Tensor,
    parents: Sequence[int],
    ranks: Sequence[int],
) -> list[int]:
    """The token of every node but the root: that of its rank in the list of the head of its depth."""
    tokens = []
    for node in range(1, len(parents)):
        depth = len(path_to(parents, node)) - 1
        logits = naive_head(weights, depth - 1, feature, target_head).tolist()
        tokens.append(sorted(range(len(logits)), key=lambda token: -logits[token])[ranks[node]])
    return tokens
