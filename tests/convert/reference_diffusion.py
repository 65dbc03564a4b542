"""The forward of public masked diffusion models in plain torch: a stack of layers under a mask of who sees whom."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .reference_blocks import Weights, layer, linear, rms_norm


def logits(weights: Weights, config: Mapping[str, Any], token_ids: list[int], sees: Tensor) -> Tensor:
    """Logits `[tokens, vocab]`; token i reads token j where `sees[i, j]`."""
    if config["model_type"] == "gpt2":
        return gpt2_logits(weights, config, token_ids, sees)
    rows, positions = weights["model.embed_tokens.weight"][token_ids], torch.arange(len(token_ids))
    for index in range(config["num_hidden_layers"]):
        rows = layer(weights, f"model.layers.{index}", config, rows, positions, sees)
    rows = rms_norm(weights, "model.norm", rows, config["rms_norm_eps"])
    head = "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"
    return linear(weights, head, rows)


def gpt2_logits(weights: Weights, config: Mapping[str, Any], token_ids: list[int], sees: Tensor) -> Tensor:
    """The same for GPT-2 under the names of DiffuGPT."""
    tables = weights["embed_tokens.weight"], weights["denoise_model.wpe.weight"]
    rows, size = tables[0][token_ids] + tables[1][: len(token_ids)], config["n_embd"] // config["n_head"]
    for index in range(config["n_layer"]):
        name = f"denoise_model.h.{index}"
        parts = matmul(weights, f"{name}.attn.c_attn", layer_norm(weights, f"{name}.ln_1", rows)).chunk(3, dim=-1)
        heads = []
        for queries, keys, values in zip(*(part.split(size, dim=-1) for part in parts), strict=True):
            scores = (queries @ keys.T / math.sqrt(size)).masked_fill(~sees, -math.inf)
            heads.append(scores.softmax(dim=-1) @ values)
        rows = rows + matmul(weights, f"{name}.attn.c_proj", torch.cat(heads, dim=-1))
        inner = matmul(weights, f"{name}.mlp.c_fc", layer_norm(weights, f"{name}.ln_2", rows))
        inner = inner / 2 * (1 + (math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)).tanh())
        rows = rows + matmul(weights, f"{name}.mlp.c_proj", inner)
    return layer_norm(weights, "denoise_model.ln_f", rows) @ tables[0].T


def matmul(weights: Weights, name: str, rows: Tensor) -> Tensor:
    """`rows @ weight + bias`."""
    return rows @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def layer_norm(weights: Weights, name: str, rows: Tensor) -> Tensor:
    """Rows of mean 0 and variance 1, times gains and plus biases."""
    centred = rows - rows.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


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
