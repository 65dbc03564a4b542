"""The Falcon drafter: an LSTM over pairs of token embedding and target feature, then relaxed-causal attention blocks.

Holds neither embedding nor head: both are the target's, and come in and go out as vectors. Source: arXiv 2412.12639,
section 3.1.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import Cache, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ...core.masks import additive, block_causal_mask, block_ends
from ...core.packing import is_packed, one_text, same_text, text_lengths, text_numbers, unpack
from ...core.tree import DraftTree
from ...generation.model_parts import device_of
from ...transformers_versions import CACHE
from ..base import DrafterModel
from ..tree_drafting.static import tree_from_json
from .configuration_falcon import FalconSpecConfig
from .generator import FalconCandidateGenerator
from .recurrence import Recurrence
from .transition import Transition

ATTENTION_BIAS = 3.0  # of fresh queries and keys
POSITION_SPREAD = 0.3  # of fresh block positions

RecurrentState = tuple[Tensor, Tensor]  # hidden and cell, each [recurrent layers, rows, hidden]


class _WithQueriesOf:
    """Attention with queries of rows of their own; projections stay linear layers, which adapters can be put on."""

    def __init__(self, attention: LlamaAttention, rows: Tensor) -> None:
        self._attention, self._rows = attention, rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def q_proj(self, _rows: Tensor) -> Tensor:
        """Queries of the rows that were given, not of those that keys and values are made of."""
        return self._attention.q_proj(self._rows)


class BlockAttention(LlamaAttention):
    """Attention that adds to each row a vector for its block position, and with `newest_row` one of the newest row.

    With `newest_row` queries know both. Keys and values stay free of them: they outlive the block.
    """

    def __init__(self, config: FalconSpecConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        size, hidden = config.block_size, config.hidden_size
        self.block_position = nn.Embedding(size, hidden)
        self.newest = nn.Linear(hidden, size * hidden, bias=False) if config.newest_row else None

    def forward(  # the layer passes on what it is given
        self, hidden_states: Tensor, *args: Any, block_positions: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The output of attention plus the vectors of position and newest row."""
        added, attention = self.block_position(block_positions), self
        if self.newest is not None:
            added = added + self._newest(hidden_states, block_positions)
            attention = cast(Any, _WithQueriesOf(self, hidden_states + added))
        outputs, weights = LlamaAttention.forward(attention, hidden_states, *args, **kwargs)
        return outputs + added, weights

    def _newest(self, states: Tensor, block_positions: Tensor) -> Tensor:
        """The map, for each row's block position, of the last row of its block, or of the last one there is."""
        assert self.newest is not None  # the caller asked
        rows = torch.arange(states.shape[1], device=states.device)
        positions = block_positions.expand(len(states), -1)
        last = (rows + self.config.block_size - 1 - positions).clamp(max=len(rows) - 1)
        maps = self.newest(states).unflatten(-1, (self.config.block_size, -1))
        return maps[torch.arange(len(states), device=states.device)[:, None], last, positions]


class FalconSpecDrafter(DrafterModel):
    """Drafts `block_size` tokens a pass from the target's own features.

    Row p of the input holds the embedding of token p + 1 and the feature of token p; row p of the output is the
    feature expected at token p + k, so the last k rows draft the next k tokens at once.

    Example:

    ```python
    >>> config = FalconSpecConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, block_size=2)
    >>> drafter = FalconSpecDrafter(config)
    >>> drafter(torch.zeros(1, 5, 32), torch.zeros(1, 5, 32), phases=torch.tensor([1])).shape
    torch.Size([1, 5, 32])

    ```
    """

    config: FalconSpecConfig
    config_class = FalconSpecConfig
    generator_class = FalconCandidateGenerator
    base_model_prefix = "drafter"
    main_input_name = "token_embeds"
    supports_gradient_checkpointing = True
    can_grow_trees = True
    has_window = True
    can_repeat_text = True
    _supports_sdpa = True
    _no_split_modules = ["LlamaDecoderLayer"]  # noqa: RUF012  Transformers reads a plain list

    def __init__(self, config: FalconSpecConfig) -> None:
        super().__init__(config)
        assert config.embedding_size is not None  # the configuration fills in both widths
        assert config.feature_size is not None
        self.recurrence = Recurrence(
            config.embedding_size + config.feature_size,
            config.hidden_size,
            num_layers=config.num_recurrent_layers,
            dropout=config.recurrent_dropout if config.num_recurrent_layers > 1 else 0.0,
            batch_first=True,
        )
        if config.recurrence == "token":  # no state, so nothing to learn for its weights; published files hold them
            for number in range(config.num_recurrent_layers):
                getattr(self.recurrence, f"weight_hh_l{number}").requires_grad_(False)
        if config.shortcut:
            self.shortcut = nn.Linear(config.embedding_size + config.feature_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()
        if config.block_position_embedding:
            for index, layer in enumerate(self.layers):
                layer.self_attn = BlockAttention(config, index)
        if config.transition_rank is not None:
            self.transition = Transition(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size).requires_grad_(False)
        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> "FalconSpecDrafter":
        """A fresh drafter whose sizes fit `target`, on its device; `options` are fields of [`FalconSpecConfig`]."""
        drafter = cls(FalconSpecConfig.from_target(target, **options))
        drafter._aim_attention()
        if drafter.config.transition_rank is not None:
            nn.init.zeros_(drafter.transition.after.weight)
        return drafter.eval().to(device=device_of(target))

    @torch.no_grad()
    def _aim_attention(self) -> None:
        """Start attention that has biases so that head h looks at the row h mod k ahead.

        A row must read the rows that follow it in its block and know its own position there. Attention that starts out
        even over the whole text takes long to find them; see `LOG.md` for the measurement.
        """
        config = self.config
        assert config.num_key_value_heads is not None  # the configuration fills in both
        assert config.head_dim is not None
        query = torch.full((1, config.num_key_value_heads, 1, config.head_dim), ATTENTION_BIAS, dtype=torch.float)
        rows_ahead = torch.arange(config.num_key_value_heads)[None] % config.block_size
        _, key = apply_rotary_pos_emb(query, query, *self.rotary_emb(query, -rows_ahead), unsqueeze_dim=2)
        for attention in (part for part in self.modules() if isinstance(part, LlamaAttention)):
            if isinstance(attention, BlockAttention):
                attention.block_position.weight.normal_(std=POSITION_SPREAD)
            if config.attention_bias:
                attention.q_proj.bias.fill_(ATTENTION_BIAS)
                attention.k_proj.bias.copy_(key.flatten())

    def forward(
        self,
        token_embeds: Float[Tensor, "rows tokens embed"],
        features: Float[Tensor, "rows tokens feature"],
        phases: Int[Tensor, " texts"],
        is_token: Bool[Tensor, "rows tokens"] | None = None,
        positions: Int[Tensor, "_ tokens"] | None = None,
        **_: Any,
    ) -> Float[Tensor, "rows tokens hidden"]:
        """Read whole sequences, as in training: the feature expected at token p + k.

        Row p holds the embedding of token p + 1 and the target's feature of token p. Blocks of each text start at
        positions p with p = phase modulo k. Padding, where `is_token` is False, must end a text. Where a row holds
        several texts, `positions` are those in each of them (`core/packing.py`); state, attention and blocks end with
        a text.
        """
        positions = one_text(token_embeds.shape[1], token_embeds.device) if positions is None else positions
        numbers = text_numbers(positions, len(token_embeds))
        ends = block_ends(positions[..., None], self.config.block_size, phases[numbers])[..., 0]
        mask = block_causal_mask(ends, positions) & same_text(positions)
        mask = mask if is_token is None else mask & is_token[:, None, :]
        rows = torch.cat([token_embeds, features], dim=-1).to(self.dtype)
        if is_packed(positions):  # every text from a fresh state
            fused = self.recur(unpack(rows, numbers, positions), None, text_lengths(numbers))[0][numbers, positions]
        else:
            fused = self.recur(rows, None)[0]
        return self.attend(fused, mask, positions, (positions - phases[numbers]) % self.config.block_size)

    def recur(
        self,
        rows: Float[Tensor, "rows tokens fused"],
        state: RecurrentState | None,
        num_tokens: Sequence[int] | Int[Tensor, "rows 1"] | None = None,
    ) -> tuple[Float[Tensor, "rows tokens hidden"], RecurrentState | None]:
        """The LSTM's outputs from `state` on, and its state after the last row, or after `num_tokens` of each row.

        With a tensor of them nothing is asked of the host.
        """
        if self.config.recurrence == "token":
            outputs, after = self._recur_afresh(rows), None
        elif isinstance(num_tokens, Tensor):
            assert state is not None  # of what was read before
            outputs, after = self.recurrence.stepwise(rows, state, num_tokens)
        elif num_tokens is None or min(num_tokens) == rows.shape[1]:
            outputs, after = self.recurrence(rows, state)
        else:
            outputs, after = self._recur_packed(rows, state, num_tokens)
        return (outputs + self.shortcut(rows) if self.config.shortcut else outputs), after

    def _recur_packed(
        self, rows: Tensor, state: RecurrentState | None, num_tokens: Sequence[int]
    ) -> tuple[Tensor, RecurrentState]:
        """The outputs, and the state after `num_tokens` of each row, which stays as it was where there are none."""
        lengths = torch.tensor([max(num, 1) for num in num_tokens])  # a packed row cannot be empty
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        outputs, (hidden, cell) = self.recurrence(packed, state)
        before = (torch.zeros_like(hidden), torch.zeros_like(cell)) if state is None else state
        is_new = torch.tensor(num_tokens, device=rows.device)[:, None] > 0
        after = (hidden.where(is_new, before[0]), cell.where(is_new, before[1]))
        return pad_packed_sequence(outputs, batch_first=True, total_length=rows.shape[1])[0], after

    def _recur_afresh(self, rows: Float[Tensor, "rows tokens fused"]) -> Float[Tensor, "rows tokens hidden"]:
        """The LSTM from a zero state at tokens, as matrix products; recurrent weights and forget gate do nothing."""
        lstm, size = self.recurrence, self.config.hidden_size
        for layer in range(lstm.num_layers):
            weight, *biases = (getattr(lstm, f"{name}_l{layer}") for name in ("weight_ih", "bias_ih", "bias_hh"))
            bias = sum(biases)
            entry = functional.linear(rows, weight[:size], bias[:size])
            cell, exit_ = functional.linear(rows, weight[2 * size :], bias[2 * size :]).chunk(2, dim=-1)
            rows = exit_.sigmoid() * (entry.sigmoid() * cell.tanh()).tanh()
            if layer < lstm.num_layers - 1:
                rows = functional.dropout(rows, lstm.dropout, self.training)
        return rows

    def attend(
        self,
        rows: Float[Tensor, "rows tokens hidden"],
        mask: Bool[Tensor, "masks tokens keys"],
        positions: Int[Tensor, "_ tokens"],
        block_positions: Int[Tensor, "_ tokens"],
        cache: Cache | None = None,
    ) -> Float[Tensor, "rows tokens hidden"]:
        """The attention blocks over the LSTM's outputs; keys and values go to `cache`, where one is given."""
        inputs: dict[str, Any] = {"attention_mask": additive(mask, rows.dtype), CACHE: cache}
        inputs["position_embeddings"] = self.rotary_emb(rows, positions)
        if self.config.block_position_embedding:
            inputs["block_positions"] = block_positions
        for layer in self.layers:
            rows = layer(rows, **inputs)
        return rows

    def change_after(self, token_ids: Tensor, prepared: Tensor, token_embeds: Tensor | None) -> Tensor:
        """What the transition adds to the logits of features that it has prepared, after tokens of the block."""
        return self.transition.after_tokens(token_ids, prepared, token_embeds)

    @property
    def draft_tree(self) -> DraftTree:
        """The tree to draft: that of `generation_config`, else of the config, else a chain of one block."""
        return tree_from_json(self.stored_tree or DraftTree.chain(self.config.block_size).to_json())

    @property
    def block_size(self) -> int:
        """Tokens drafted in one pass."""
        return self.config.block_size

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft, root included."""
        num_nodes = self.generation_config.num_tree_nodes if self.is_tree_dynamic else len(self.draft_tree)
        return num_nodes + self.num_text_tokens
