"""The published Falcon drafter in plain torch: an LSTM called without `batch_first`, then block-causal layers.

Blocks end at the newest row, as the package cuts them, and not at a multiple of k from the first row fed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .reference_blocks import Weights, layer


def features_of(weights: Weights, config: dict[str, Any], embeds: Tensor, features: Tensor, phase: int) -> Tensor:
    """Predict the features k rows later, all `[rows, hidden]`; blocks start at `phase`."""
    num_rows, hidden = features.shape
    lstm = nn.LSTM(2 * hidden, hidden, num_layers=2, bias=config.get("bias", True), dtype=features.dtype)
    lstm.load_state_dict({name[5:]: weight for name, weight in weights.items() if name.startswith("lstm.")})
    fused = lstm(torch.cat([embeds, features], dim=-1)[None])[0][0]  # dimension 0, of size 1, is taken for time
    block = [(row - phase) // config["k_mask"] for row in range(num_rows)]
    sees = torch.tensor([[block[key] <= block[row] for key in range(num_rows)] for row in range(num_rows)])
    for index in range(config["num_hidden_layers"]):
        fused = layer(weights, f"layers.{index}", config, fused, torch.arange(num_rows), sees)
    return fused


def drafted(
    weights: Weights,
    config: dict[str, Any],
    token_ids: list[int],
    features: Tensor,
    head: Callable[[Tensor], Tensor],
    num_passes: int,
) -> tuple[list[int], Tensor]:
    """A chain of `num_passes` blocks after `token_ids`, and the predicted features `[tokens, hidden]` it came from.

    `features` are those of all tokens but the last. Predicted features and chosen tokens are fed back as rows.
    """
    size, drafts = config["k_mask"], []
    tokens, rows = list(token_ids), features
    for _ in range(num_passes):
        embeds = weights["embed_tokens.weight"][tokens[1 : len(rows) + 1]]
        block = features_of(weights, config, embeds, rows, len(rows) % size)[-size:]
        drafts.append(block)
        tokens += head(block).argmax(-1).tolist()
        rows = torch.cat([rows, block])
    return tokens[len(token_ids) :], torch.cat(drafts)
