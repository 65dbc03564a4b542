"""The forward of public masked diffusion models in plain torch: a stack of layers under a mask of who sees whom."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .reference_blocks import Weights, layer, linear, rms_norm


def logits(weights: Weights, config: Mapping[str, Any], token_ids: list[int], sees: Tensor) -> Tensor:
    """Logits `[tokens, vocab]`; token i reads token j where `sees[i, j]`."""
    rows, positions = weights["model.embed_tokens.weight"][token_ids], torch.arange(len(token_ids))
    for index in range(config["num_hidden_layers"]):
        rows = layer(weights, f"model.layers.{index}", config, rows, positions, sees)
    rows = rms_norm(weights, "model.norm", rows, config["rms_norm_eps"])
    head = "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"
    return linear(weights, head, rows)


def drafted(
    weights: Weights, config: Mapping[str, Any], text: list[int], num: int, mask: int, shift: int, block: int | None
) -> Tensor:
    """Logits `[num, vocab]` of the tokens behind a text, one after the other.

    With a shift of 1 the row of a token speaks of the next one, so that the newest token's speaks of the first. All see
    all, or with a `block` those of their own block of a fixed grid and of earlier ones.
    """
    token_ids = [*text, *[mask] * (num - shift)]
    size = block or len(token_ids)
    places = range(len(token_ids))
    sees = torch.tensor([[key // size <= query // size for key in places] for query in places])
    return logits(weights, config, token_ids, sees)[len(text) - shift :]
