"""Eagle in plain torch from its description: no cache, no Transformers, every row read anew for every question.

Sources: arXiv 2401.15077, 2406.16858 and 2503.01840, and the published checkpoints' tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.growing import grown_paths
from tests.reference import Path


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, in float32 as Transformers has it."""
    exact = states.float()
    return weight * (exact / (exact.pow(2).mean(-1, keepdim=True) + eps).sqrt()).to(states.dtype)


def rotated(states: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of `[heads, size]`: entries i and i + size / 2 turn by position / theta^(2i / size)."""
    half = states.shape[-1] // 2
    angles = position / theta ** (torch.arange(half, dtype=torch.float) / half)
    cos, sin = angles.cos().to(states), angles.sin().to(states)
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class NaiveEagle:
    """One row of text and what an Eagle drafter with these weights says of it.

    Args:
        drafter (`Any`): Whose weights and sizes it takes.
        target (`Any`): What embeds tokens and makes logits of features.
    """

    def __init__(self, drafter: Any, target: Any) -> None:
        self.weights, self.config, self.target = drafter.state_dict(), drafter.config, target
        self.window: int | None = drafter.sliding_window
        self.pairs: list[tuple[Tensor, Tensor]] = []  # embedding of token p + 1, and what is read beside it

    def commit(self, token_ids: Sequence[int], features: Tensor) -> None:
        """New pairs of feature and next token."""
        for token, feature in zip(token_ids, features, strict=True):
            self.pairs.append((self._embed(token), self._fused(feature)))

    @torch.no_grad()
    def state(self, path: Path, num_true: int | None = None) -> Tensor:
        """What the drafter says after the first `num_true` pairs (all of them) and the tokens of `path` after those."""
        rows, window = self.pairs[:num_true], self.window
        num_true = len(rows)
        for depth, token in enumerate(path):
            above = self.state(path[:depth], num_true)
            fed_back = norm(above, self.weights["norm.weight"], self._eps) if self.config.norm_output else above
            rows = [*rows, (self._embed(token), fed_back)]
        first = 0 if window is None else min(max(len(rows) - window, 0), num_true)
        return self._last_row(rows, first)

    def probs(self, path: Path, temperature: float = 1.0) -> Tensor:
        """The distribution of the token after `path`, over the target's vocabulary."""
        state = self.state(path)
        if self.config.version == 1:
            logits = self.target.head(state).double()
            if "t2d" in self.weights:
                logits = logits.masked_fill(~self.weights["t2d"], -torch.inf)
            return (logits / temperature).softmax(-1)
        logits = self.weights["lm_head.weight"] @ norm(state, self.weights["norm.weight"], self._eps)
        probs = torch.zeros(self.config.vocab_size, dtype=torch.double)
        for own, probability in enumerate((logits.double() / temperature).softmax(-1)):
            probs[own + (int(self.weights["d2t"][own]) if "d2t" in self.weights else 0)] = probability
        return probs

    def static(self, parents: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
        """The token of every node of a static tree but the root."""
        paths: dict[int, Path] = {0: ()}
        for node in range(1, len(parents)):
            best = self.probs(paths[parents[node]]).argsort(descending=True)
            paths[node] = (*paths[parents[node]], int(best[ranks[node]]))
        return {node: path[-1] for node, path in paths.items() if node}

    def grown(self, depth: int, top_k: int, num_nodes: int) -> list[Path]:
        """Paths of the tree that grows."""
        return grown_paths(lambda path, _place: self.probs(path).tolist(), depth, top_k, num_nodes)

    @property
    def _eps(self) -> float:
        return self.config.rms_norm_eps

    def _embed(self, token: int) -> Tensor:
        return self.target.embed(torch.tensor([token]))[0]

    def _fused(self, feature: Tensor) -> Tensor:
        """What stands beside an embedding: the feature itself, or the features of several layers made one."""
        if self.config.version == 1:
            return feature
        if self.config.norm_before_fc:
            feature = norm(feature, self.weights["input_norm.weight"], self._eps)
        if self.config.fc_norm:
            parts = feature.chunk(len(self.config.feature_layers))
            feature = torch.cat(
                [norm(part, self.weights[f"fc_norm.{i}.weight"], self._eps) for i, part in enumerate(parts)]
            )
        return self._linear("fc", feature)

    def _linear(self, name: str, states: Tensor) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        product = self.weights[f"{name}.weight"] @ states
        return product if bias is None else product + bias

    def _attention_input(self, embed: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads of a row, and its residual."""
        if self.config.version == 1:
            fused = self._linear("fc", torch.cat([embed, beside]))
            return fused, fused
        normed = norm(beside, self.weights["layer.hidden_norm.weight"], self._eps)
        read = torch.cat([norm(embed, self.weights["layer.input_layernorm.weight"], self._eps), normed])
        return read, normed if self.config.norm_before_residual else beside

    def _last_row(self, rows: Sequence[tuple[Tensor, Tensor]], first: int) -> Tensor:
        config, theta = self.config, self.config.rope_parameters["rope_theta"]
        size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
        inputs = [self._attention_input(*row) for row in rows]
        keys, values = [], []
        for position, (read, _) in enumerate(inputs):
            keys.append(rotated(self._linear("layer.self_attn.k_proj", read).view(-1, size), position, theta))
            values.append(self._linear("layer.self_attn.v_proj", read).view(-1, size))
        read, residual = inputs[-1]
        query = rotated(self._linear("layer.self_attn.q_proj", read).view(-1, size), len(rows) - 1, theta)
        heads = []
        for head in range(config.num_attention_heads):
            scores = torch.stack([key[head // group] @ query[head] for key in keys[first:]]) / size**0.5
            heads.append(scores.softmax(0) @ torch.stack([value[head // group] for value in values[first:]]))
        states = residual + self._linear("layer.self_attn.o_proj", torch.cat(heads))
        normed = norm(states, self.weights["layer.post_attention_layernorm.weight"], self._eps)
        gate = torch.nn.functional.silu(self._linear("layer.mlp.gate_proj", normed))
        return states + self._linear("layer.mlp.down_proj", gate * self._linear("layer.mlp.up_proj", normed))
