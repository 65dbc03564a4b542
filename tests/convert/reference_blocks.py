"""Plain torch twins of the parts of foreign drafters: norms, rotary positions, attention and MLP.

Nothing of the package and nothing of Transformers is used here.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def linear(weights: Weights, name: str, rows: Tensor) -> Tensor:
    """`rows @ weight.T + bias`, the bias where there is one."""
    outputs = rows @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return outputs if bias is None else outputs + bias


def rms_norm(weights: Weights, name: str, rows: Tensor, eps: float) -> Tensor:
    """Rows over their root mean square, times the gains."""
    return rows / (rows.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]


def silu(values: Tensor) -> Tensor:
    """`x * sigmoid(x)`."""
    return values / (1 + (-values).exp())


def speeds(config: Mapping[str, Any], size: int) -> Tensor:
    """Angle per position of each pair of a head: `theta ** (-2 i / size)`, slowed down as `rope_scaling` says."""
    given = config.get("rope_parameters") or config  # version 5 of Transformers keeps them together
    theta, scaling = given.get("rope_theta", 10000.0), config.get("rope_scaling") or {}
    kind, found = scaling.get("rope_type", scaling.get("type")), []
    for pair in range(size // 2):
        speed, factor = theta ** (-2 * pair / size), scaling.get("factor", 1.0)
        if kind == "linear":
            speed /= factor
        elif kind == "llama3":  # slow pairs are slowed down, fast ones are not, those between in part
            turns = scaling["original_max_position_embeddings"] * speed / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            share = min(max((turns - low) / (high - low), 0.0), 1.0)
            speed *= share + (1 - share) / factor
        found.append(speed)
    return torch.tensor(found)


def rotated(vectors: Tensor, positions: Tensor, angle_per_position: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of `[rows, heads, size]`."""
    half = vectors.shape[-1] // 2
    angles = positions.to(vectors.dtype)[:, None, None] * angle_per_position
    first, second = vectors[..., :half], vectors[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def attention(
    weights: Weights, name: str, config: Mapping[str, Any], rows: Tensor, positions: Tensor, sees: Tensor
) -> Tensor:
    """Attention of `[rows, width]`; row i reads row j where `sees[i, j]`. Heads one by one, groups share keys."""
    num_heads, num_groups = config["num_attention_heads"], config.get("num_key_value_heads")
    num_groups = num_groups or num_heads
    size = config.get("head_dim") or config["hidden_size"] // num_heads
    angles = speeds(config, size)
    queries = linear(weights, f"{name}.q_proj", rows).reshape(len(rows), num_heads, size)
    keys = linear(weights, f"{name}.k_proj", rows).reshape(len(rows), num_groups, size)
    values = linear(weights, f"{name}.v_proj", rows).reshape(len(rows), num_groups, size)
    if f"{name}.q_norm.weight" in weights:  # Qwen3
        queries = rms_norm(weights, f"{name}.q_norm", queries, config["rms_norm_eps"])
        keys = rms_norm(weights, f"{name}.k_norm", keys, config["rms_norm_eps"])
    queries, keys = rotated(queries, positions, angles), rotated(keys, positions, angles)
    outputs = []
    for head in range(num_heads):
        group = head * num_groups // num_heads
        scores = queries[:, head] @ keys[:, group].T / math.sqrt(size)
        shares = torch.softmax(scores.masked_fill(~sees, -math.inf), dim=-1)
        outputs.append(shares @ values[:, group])
    return linear(weights, f"{name}.o_proj", torch.cat(outputs, dim=-1))


def mlp(weights: Weights, name: str, rows: Tensor) -> Tensor:
    """SwiGLU."""
    gate, up = linear(weights, f"{name}.gate_proj", rows), linear(weights, f"{name}.up_proj", rows)
    return linear(weights, f"{name}.down_proj", silu(gate) * up)


def layer(
    weights: Weights, name: str, config: Mapping[str, Any], rows: Tensor, positions: Tensor, sees: Tensor
) -> Tensor:
    """A pre-norm layer; without an `input_layernorm` among the weights, attention reads the rows as they are."""
    eps = config.get("rms_norm_eps", 1e-6)
    has_norm = f"{name}.input_layernorm.weight" in weights
    inputs = rms_norm(weights, f"{name}.input_layernorm", rows, eps) if has_norm else rows
    rows = rows + attention(weights, f"{name}.self_attn", config, inputs, positions, sees)
    return rows + mlp(weights, f"{name}.mlp", rms_norm(weights, f"{name}.post_attention_layernorm", rows, eps))
