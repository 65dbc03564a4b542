"""The published Medusa heads in plain torch: residual blocks, then an LM head of their own or none."""

import torch
from torch import Tensor

from .reference_blocks import Weights, linear, silu


def outputs(weights: Weights, num_heads: int, num_layers: int, features: Tensor) -> Tensor:
    """Apply the heads to `[rows, hidden]`: `[heads, rows, vocab]`, or `[heads, rows, hidden]` without LM heads."""
    found = []
    for head in range(num_heads):
        rows = features
        for block in range(num_layers):
            rows = rows + silu(linear(weights, f"{head}.{block}.linear", rows))
        last = f"{head}.{num_layers}"
        found.append(linear(weights, last, rows) if f"{last}.weight" in weights else rows)
    return torch.stack(found)
