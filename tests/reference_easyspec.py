"""EasySpec from its description: no cache, no masks, one token at a time, everything read anew for every question.

Matrices, norms and MLPs are the model's; who reads what, attention itself and positions are written out. Source: arXiv 2502.02493,
section 4.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.growing import grown_paths
from tests.reference import Path

Memory = list[list[tuple[Tensor, Tensor]]]  # of each layer the keys and values `[heads, size]` of all tokens so far


class NaiveLayerParallel:
    """One row of text, and what a draft model with these groups says of it.

    Args:
        model (`Any`): Whose weights it takes.
        groups (`Sequence[Sequence[int]]`): Layers that read the same input when a draft is read.
        num_tokens (`int`): Tokens that can be drafted: the first ones.
    """

    def __init__(self, model: Any, groups: Sequence[Sequence[int]], num_tokens: int) -> None:
        self.model, self.groups, self.num_tokens = model, groups, num_tokens
        decoder = model.base_model
        self.layers, self.config, self.final_norm = decoder.layers, model.config, decoder.norm
        self.text: list[int] = []
        self._known: dict[Path, Tensor] = {}

    def commit(self, token_ids: Sequence[int]) -> None:
        """New text."""
        self.text += token_ids
        self._known = {}

    def probs(self, path: Path, temperature: float = 1.0) -> Tensor:
        """The distribution of the token after the text and `path`, over the tokens that can be drafted."""
        return (self.logits(path) / temperature).softmax(-1)

    def logits(self, path: Path) -> Tensor:
        """What the head says after the text, read layer after layer, and `path`, read group by group."""
        if path not in self._known:
            state = self.states(path)[-1]
            self._known[path] = self.model.get_output_embeddings()(state).double()[: self.num_tokens]
        return self._known[path]

    @torch.no_grad()
    def states(self, path: Path) -> list[Tensor]:
        """What the head reads after every token of the text and of `path`."""
        memory: Memory = [[] for _ in self.layers]
        tokens = [*self.text, *path]
        exact = [position < len(self.text) for position in range(len(tokens))]
        return [self._read(token, position, exact[position], memory) for position, token in enumerate(tokens)]

    def grown(self, depth: int, top_k: int, num_nodes: int) -> list[Path]:
        """Paths of the tree that grows."""
        return grown_paths(lambda path, _offset: self.probs(path).tolist(), depth, top_k, num_nodes)

    def static(self, parents: Sequence[int], ranks: Sequence[int]) -> dict[int, int]:
        """The token of every node of a static tree but the root."""
        paths: dict[int, Path] = {0: ()}
        for node in range(1, len(parents)):
            best = self.logits(paths[parents[node]]).argsort(descending=True)
            paths[node] = (*paths[parents[node]], int(best[ranks[node]]))
        return {node: path[-1] for node, path in paths.items() if node}

    def _read(self, token: int, position: int, is_exact: bool, memory: Memory) -> Tensor:
        """One token through all layers; its keys and values join the others."""
        own = token if token < self.config.vocab_size else 0
        state = self.model.get_input_embeddings()(torch.tensor([own]))[0]
        groups = [[number] for number in range(len(self.layers))] if is_exact else self.groups
        for group in groups:
            attended = [self._attend(number, state, position, memory[number]) for number in group]  # all of one state
            for number, read in zip(group, attended, strict=True):
                state = self._finish(self.layers[number], state, read)
        return self.final_norm(state)

    def _finish(self, layer: Any, state: Tensor, attended: Tensor) -> Tensor:
        """Attention joins in, then the MLP, which reads what there is by now."""
        return state + attended + layer.mlp(layer.post_attention_layernorm(state + attended))

    def _attend(self, number: int, state: Tensor, position: int, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        layer, config = self.layers[number], self.config
        attention = layer.self_attn
        query, key, value = self._heads(attention, layer.input_layernorm(state))
        memory.append((self._turned(key, position), value))
        query = self._turned(query, position)
        kinds = getattr(config, "layer_types", None)
        is_wide = kinds is not None and kinds[number] == "full_attention"
        window = (None if is_wide else getattr(config, "sliding_window", None)) or len(memory)
        keys, values = (torch.stack(part) for part in zip(*memory[-window:], strict=True))  # [tokens, heads, size]
        heads = []
        for head, question in enumerate(query):
            theirs = head * keys.shape[1] // len(query)
            scores = keys[:, theirs] @ question / len(question) ** 0.5
            heads.append(scores.softmax(0) @ values[:, theirs])
        return attention.o_proj(torch.cat(heads))

    def _heads(self, attention: Any, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value `[heads, size]`, normed where the model does so."""
        size = attention.head_dim
        query, key, value = (
            getattr(attention, name)(normed).view(-1, size) for name in ("q_proj", "k_proj", "v_proj")
        )
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        return query, key, value

    def _turned(self, heads: Tensor, position: int) -> Tensor:
        """Rotary positions: entries i and i + size / 2 turn by position / theta^(2i / size)."""
        size = heads.shape[-1]
        angles = position * (
            1 / self.config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)
        )
        cosines, sines = angles.cos().to(heads), angles.sin().to(heads)
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
