"""The published Eagle drafters in plain torch: Eagle-1/2, and Eagle-3 with what 3.1 and speculators change."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .reference_blocks import Weights, attention, layer, linear, mlp, rms_norm


def causal(num_rows: int) -> Tensor:
    """Every row sees itself and those before it."""
    return torch.tensor([[key <= row for key in range(num_rows)] for row in range(num_rows)])


def first_forward(weights: Weights, config: Mapping[str, Any], embeds: Tensor, features: Tensor) -> Tensor:
    """Eagle-1: the feature expected one row on, of `[rows, hidden]` embeddings and features."""
    rows = linear(weights, "fc", torch.cat([embeds, features], dim=-1))
    positions, sees = torch.arange(len(rows)), causal(len(rows))
    return layer(weights, "layers.0", config, rows, positions, sees)


def fused(weights: Weights, config: Mapping[str, Any], features: Tensor) -> Tensor:
    """Eagle-3: the state of each row, of the features `[rows, 3 * target hidden]` of three layers."""
    eps = config["rms_norm_eps"]
    if "input_norm.weight" in weights:
        features = rms_norm(weights, "input_norm", features, eps)
    if "fc_norm.0.weight" in weights:
        parts = features.chunk(3, dim=-1)
        features = torch.cat([rms_norm(weights, f"fc_norm.{i}", part, eps) for i, part in enumerate(parts)], dim=-1)
    return linear(weights, "fc", features)


def third_forward(
    weights: Weights,
    config: Mapping[str, Any],
    name: str,
    embeds: Tensor,
    states: Tensor,
    sees: Tensor | None = None,
) -> Tensor:
    """Eagle-3: the state one row on, before the final norm; `name` is that of the layer."""
    eps = config["rms_norm_eps"]
    positions, sees = torch.arange(len(states)), causal(len(states)) if sees is None else sees
    normed = rms_norm(weights, f"{name}.hidden_norm", states, eps)
    rows = torch.cat([rms_norm(weights, f"{name}.input_layernorm", embeds, eps), normed], dim=-1)
    residual = normed if config.get("norm_before_residual") else states
    states = residual + attention(weights, f"{name}.self_attn", config, rows, positions, sees)
    return states + mlp(weights, f"{name}.mlp", rms_norm(weights, f"{name}.post_attention_layernorm", states, eps))


def third_logits(weights: Weights, config: Mapping[str, Any], states: Tensor) -> Tensor:
    """Logits over the tokens that can be drafted."""
    return linear(weights, "lm_head", rms_norm(weights, "norm", states, config["rms_norm_eps"]))


def parallel_logits(
    weights: Weights,
    config: Mapping[str, Any],
    name: str,
    embeddings: Tensor,
    token_ids: list[int],
    features: Tensor,
    num_drafted: int,
) -> Tensor:
    """P-EAGLE: the logits `[drafted, draft vocab]` of the newest pair and of the masks behind it, in one forward.

    With a window a row sees so many pairs of the text, its own included, and all masks before it.
    """
    num_pairs, num_masks = len(features), num_drafted - 1
    mask_id = config.get("ptd_token_id", config.get("mask_token_id"))
    embeds = embeddings[[*token_ids[1:], *[mask_id] * num_masks]]
    rows = torch.cat([features, weights["mask_hidden"].reshape(1, -1).expand(num_masks, -1)])
    window = config["sliding_window"] if "sliding_attention" in config.get("layer_types", ()) else len(rows)
    sees = torch.tensor(
        [
            [key <= row and (key >= num_pairs or row - key < window) for key in range(len(rows))]
            for row in range(len(rows))
        ]
    )

    states = third_forward(weights, config, name, embeds, fused(weights, config, rows), sees)
    positions = torch.arange(len(rows))
    for number in range(1, config["num_hidden_layers"]):
        states = layer(weights, f"layers.{number}", config, states, positions, sees)
    return third_logits(weights, config, states[num_pairs - 1 :])


def drafted_first(
    weights: Weights,
    config: Mapping[str, Any],
    token_ids: list[int],
    features: Tensor,
    head: Callable[[Tensor], Tensor],
    depth: int,
) -> tuple[list[int], Tensor]:
    """A chain of the likeliest tokens after `token_ids`, and the predicted features `[depth, hidden]` it came from."""
    tokens, rows = list(token_ids), features
    for _ in range(depth):
        embeds = weights["embed_tokens.weight"][tokens[1:]]
        newest = first_forward(weights, config, embeds, rows)[-1:]
        tokens.append(int(head(newest).argmax()))
        rows = torch.cat([rows, newest])
    return tokens[len(token_ids) :], rows[len(features) :]


def drafted_third(
    weights: Weights,
    config: Mapping[str, Any],
    name: str,
    embeddings: Tensor,
    token_ids: list[int],
    features: Tensor,
    depth: int,
) -> tuple[list[int], Tensor]:
    """The same for Eagle-3, and the logits `[depth, draft vocab]` it came from."""
    tokens, rows, logits = list(token_ids), fused(weights, config, features), []
    for _ in range(depth):
        newest = third_forward(weights, config, name, embeddings[tokens[1:]], rows)[-1:]
        logits.append(third_logits(weights, config, newest))
        choice = int(logits[-1].argmax())
        tokens.append(choice + int(weights["d2t"][choice]) if "d2t" in weights else choice)
        is_normed = config.get("norm_output", False)
        rows = torch.cat([rows, rms_norm(weights, "norm", newest, config["rms_norm_eps"]) if is_normed else newest])
    return tokens[len(token_ids) :], torch.cat(logits)
