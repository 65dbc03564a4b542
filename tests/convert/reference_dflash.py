"""The published DFlash drafters in plain torch: the states at the slots of a block, and what DFlash2 and DSpark choose there."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .reference_blocks import Weights, attention, linear, mlp, rms_norm

SLIDING = "sliding_attention"


def sees(config: Mapping[str, Any], layer: int, num_context: int, num_block: int) -> Tensor:
    """Who sees whom: features are only read; a block sees all, or a window, or within itself what is not later."""
    kind = (config.get("layer_types") or ["full_attention"] * (layer + 1))[layer]
    is_causal = config.get("is_causal", config.get("causal", config.get("causal_head")))
    if is_causal is None:
        is_causal = kind == SLIDING and not config.get("sliding_window_non_causal", False)
    window = config["sliding_window"] if kind == SLIDING else math.inf
    num = num_context + num_block
    rows = [
        [row < num_context or (abs(row - key) < window and not (is_causal and key > row)) for key in range(num)]
        for row in range(num)
    ]
    return torch.tensor(rows)


def states(weights: Weights, config: Mapping[str, Any], embeds: Tensor, features: Tensor) -> Tensor:
    """The states `[slots, hidden]` of a block of `embeds` `[block, hidden]`, the root's first, behind all `features`.

    A DSpark drafts at the root's slot, too, unless its config says otherwise.
    """
    eps, num_context = config["rms_norm_eps"], len(features)
    context = rms_norm(weights, "hidden_norm", linear(weights, "fc", features), eps)
    positions, rows = torch.arange(num_context + len(embeds)), embeds * config.get("input_embedding_scale", 1.0)
    for index in range(config["num_hidden_layers"]):
        name, visible = f"layers.{index}", sees(config, index, num_context, len(embeds))

        def attend(inputs: Tensor, name: str = name, visible: Tensor = visible) -> Tensor:
            every = torch.cat([context, inputs])
            return attention(weights, f"{name}.self_attn", config, every, positions, visible)[num_context:]

        normed = rms_norm(weights, f"{name}.input_layernorm", rows, eps)
        rows = rows + convolved(weights, f"{name}.attention_conv", config, normed, attend)
        normed = rms_norm(weights, f"{name}.post_attention_layernorm", rows, eps)
        rows = rows + convolved(
            weights, f"{name}.mlp_conv", config, normed, lambda inputs, name=name: mlp(weights, f"{name}.mlp", inputs)
        )
    first = 0 if config.get("sample_from_anchor", "markov_rank" in config) else 1
    return rms_norm(weights, "norm", rows, eps)[first:]


def convolved(weights: Weights, name: str, config: Mapping[str, Any], rows: Tensor, part: Any) -> Tensor:
    """What a part of a layer makes of rows; in DFlash2 both are convolved, by kernels that its input changes."""
    if f"{name}.base_kernel" not in weights:
        return part(rows)
    base, taps, size = weights[f"{name}.base_kernel"], config["conv_kernel_size"], config["conv_group_size"]
    num_groups = rows.shape[-1] // size
    changes = linear(weights, f"{name}.kernel_projection", rows).reshape(len(rows), 2, taps, num_groups)

    def sums(inputs: Tensor, side: int) -> Tensor:
        found = torch.zeros_like(inputs)
        for row in range(len(inputs)):
            for tap in range(min(taps, row + 1)):
                for group in range(num_groups):
                    channels = slice(group * size, (group + 1) * size)
                    kernel = base[side, tap, channels] + changes[row, side, tap, group]
                    found[row, channels] += kernel * inputs[row - tap, channels]
        return found

    return sums(part(sums(rows, 0)), 1)


def logits(config: Mapping[str, Any], rows: Tensor, head: Tensor) -> Tensor:
    """Logits `[slots, vocab]` of the target's head, scaled and capped as the config says."""
    found = rows @ head.T * config.get("output_multiplier", 1.0)
    cap = config.get("final_logit_softcapping")
    return cap * (found / cap).tanh() if cap else found


def after(
    weights: Weights, config: Mapping[str, Any], rows: Tensor, scores: Tensor, path: Sequence[int]
) -> dict[int, float]:
    """The score of each token of a slot after a path of tokens, the root first; DFlash2 has some candidates alone."""
    name, place = "candidate_selector", len(path) - 1
    if config.get("markov_rank"):
        before = weights["markov_head.markov_w1.weight"][path[-1]]
        if "markov_head.gate_proj.weight" in weights:
            read = linear(weights, "markov_head.gate_proj", torch.cat([rows[place], before]))
            before = before / (1 + (-read).exp())
        return dict(enumerate((scores[place] + weights["markov_head.markov_w2.weight"] @ before).tolist()))

    gates = linear(weights, f"{name}.hidden_projection", rows)[place]
    gates = gates * weights[f"{name}.predecessor_codebook"][path[-1]]
    best = scores[place].topk(config["selector_top_k"])
    edges = weights[f"{name}.successor_codebook"][best.indices] @ gates
    return dict(zip(best.indices.tolist(), (best.values + edges).tolist(), strict=True))


def drafted(weights: Weights, config: Mapping[str, Any], rows: Tensor, scores: Tensor, root: int) -> list[int]:
    """The chain that public software drafts when it is greedy."""
    if not config.get("selector_rank") and not config.get("markov_rank"):
        return scores.argmax(dim=-1).tolist()
    path = [root]
    for _ in range(len(rows)):
        found = after(weights, config, rows, scores, path)
        path.append(max(found, key=lambda token: found[token]))
    return path[1:]
