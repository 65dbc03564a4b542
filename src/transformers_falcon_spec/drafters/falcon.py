"""Falcon: semi-autoregressive drafting with an LSTM and relaxed-causal blocks (arXiv 2412.12639).

The drafter is an LSTM over pairs of token embedding and target feature, and attention blocks over its outputs, which
draft the next k tokens at once (section 3.1). It holds neither embedding nor head: both are the target's, and come in
and go out as vectors. A transition says how tokens of a block change what is expected after them; the paper has none.

Drafting reads committed pairs, then grows a tree or drafts a static one, block by block. Between steps it keeps keys
and values of committed rows, the LSTM's state after the last of them and its outputs for the last k - 1
(`docs/how_it_works.md`).
"""

from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ..core.masks import additive, block_causal_mask, block_ends
from ..core.options import option
from ..core.tree import DraftTree
from ..errors import OptionError
from ..generation.drafting import TargetView
from ..generation.model_parts import device_of
from ..transformers_versions import CACHE
from .base import GrowingDrafter
from .config_fields import PairConfig
from .draft_vocabulary import DraftVocabulary
from .tree_drafting.proposing import PairGenerator
from .tree_drafting.text import newest_of

RECURRENCES = ("sequence", "token")


@strict
class FalconSpecConfig(PairConfig):
    """Configuration of [`FalconSpecDrafter`]; fields of its attention blocks are those of `LlamaConfig`.

    It has the fields of [`~drafters.config_fields.PairConfig`], too: `feature_layers`, `feature_size`,
    `embedding_size`, `draft_vocab_size`, `draft_tree`, `confidence_temperatures`, and the target that it was trained
    for.

    Args:
        block_size (`int`, *optional*, defaults to 2):
            Tokens drafted in one pass of the drafter; k in the paper. 1 drafts one token a pass, as Eagle does.
        recurrence (`str`, *optional*, defaults to `"sequence"`):
            `"sequence"` lets the LSTM's state flow from token to token, as the paper says; `"token"` starts it afresh
            at every token, as the published code does.
        block_position_embedding (`bool`, *optional*, defaults to `True`):
            A learned vector shows each row its position in its block. Published drafters have neither this nor the
            next four.
        norm_inputs (`bool`, *optional*, defaults to `False`):
            Embedding and feature are each brought to a root mean square of 1 before they are read. In many targets
            features are far larger than embeddings, which then teach little at first.
        shortcut (`bool`, *optional*, defaults to `False`): A linear map of the row is added to the LSTM's output.
        newest_row (`bool`, *optional*, defaults to `False`): A linear map of the block's newest row, one for each
            position of the block, is added to each row's queries and output.
        transition_rank (`int`, *optional*): Rank of a table of scores by which each token changes the logits of the
            next. Without it the tokens of a block are predicted independently.
        transition_size (`int`, *optional*): Width of a network that adds to those scores what the last tokens of the
            block say together.
        transition_tokens (`int`, *optional*, defaults to 1): Tokens that this network reads.
        num_recurrent_layers (`int`, *optional*, defaults to 2): Layers of the LSTM.
        recurrent_dropout (`float`, *optional*, defaults to 0.1): Dropout between them, in training.

    Example:

    ```python
    >>> FalconSpecConfig(hidden_size=64, num_attention_heads=4, block_size=3).feature_size
    64

    ```
    """

    model_type = "falcon_spec"

    block_size: int = option(2, least=1)
    recurrence: str = option("sequence", one_of=RECURRENCES)
    block_position_embedding: bool = True
    norm_inputs: bool = False
    shortcut: bool = False
    newest_row: bool = False
    transition_rank: int | None = option(None, least=1)
    transition_size: int | None = option(None, least=1)
    transition_tokens: int = option(1, least=1)
    num_recurrent_layers: int = option(2, least=1)
    recurrent_dropout: float = option(0.1, least=0, most=1)

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        if self.newest_row and not self.block_position_embedding:
            raise OptionError(
                "`newest_row` needs `block_position_embedding`: rows must know their position in the block."
            )
        if self.transition_size is not None and self.transition_rank is None:
            raise OptionError(
                f"`transition_size` needs a transition, but it is {self.transition_size} and `transition_rank` is "
                "None. Give a rank, or leave `transition_size` out."
            )
        if self.transition_tokens > 1 and self.transition_size is None:
            raise OptionError(
                f"`transition_tokens` needs a network, but it is {self.transition_tokens} and `transition_size` is "
                "None. Give a size, or leave `transition_tokens` out."
            )


class Recurrence(nn.LSTM):
    """An LSTM with the weights and results of `nn.LSTM`, and on CPUs out of autocast's reach.

    Under bfloat16 autocast oneDNN would be asked for an LSTM in bfloat16, which it refuses on processors without such
    instructions (AVX512-BF16, AMX).
    """

    def forward(self, rows: Any, state: Any = None) -> Any:
        """Outputs and the state after the last of `rows`, which may be packed, from `state` on."""
        weight = self.weight_ih_l0
        if weight.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(rows, state)
        with torch.autocast("cpu", enabled=False):
            state = state and tuple(part.to(weight.dtype) for part in state)
            return super().forward(rows.to(weight.dtype), state)

    def stepwise(
        self, rows: Tensor, state: tuple[Tensor, Tensor], num: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs of `rows` `[rows, tokens, size]`, and the state after the first `num` `[rows, 1]` tokens of each.

        Computed token by token, in shapes that do not depend on `num`. Outputs behind them repeat the last one.
        """
        last_hidden = []
        last_cells = []
        for layer, (from_input, from_hidden, bias, hidden_bias) in enumerate(self.all_weights):
            inputs = functional.linear(rows.to(from_input.dtype), from_input, bias + hidden_bias)
            hidden = state[0][layer].to(from_input.dtype)
            cell = state[1][layer].to(from_input.dtype)

            outputs = []
            for token in range(rows.shape[1]):
                gates = inputs[:, token] + functional.linear(hidden, from_hidden)
                entry, forget, new, exit_ = gates.chunk(4, dim=-1)
                is_read = token < num
                cell = torch.where(is_read, forget.sigmoid() * cell + entry.sigmoid() * new.tanh(), cell)
                hidden = torch.where(is_read, exit_.sigmoid() * cell.tanh(), hidden)
                outputs.append(hidden)

            rows = torch.stack(outputs, dim=1)
            last_hidden.append(hidden)
            last_cells.append(cell)
        return rows, (torch.stack(last_hidden), torch.stack(last_cells))


class Transition(nn.Module):
    """Scores by which tokens of a block change the logits of the next one: a low-rank table, and a small network.

    The table is for the last token, weighed by the feature expected at the next. The network reads that feature and
    the embeddings of the last tokens.
    """

    def __init__(self, config: FalconSpecConfig) -> None:
        super().__init__()
        rank: Any = config.transition_rank
        size = config.transition_size
        self.rank = rank
        self.num_tokens = config.transition_tokens
        self.has_network = size is not None

        others = 1 if config.has_own_vocabulary else 0  # tokens that cannot be drafted stand before drafted ones, too
        self.before = nn.Embedding(config.num_draftable_tokens + others, rank)
        self.gate = nn.Linear(config.hidden_size, rank, bias=False)
        self.after = nn.Linear(rank, config.num_draftable_tokens, bias=False)
        if size is not None:
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.input_norm = nn.RMSNorm(config.embedding_size, eps=config.rms_norm_eps)
            self.up = nn.Linear(config.hidden_size, size, bias=False)
            self.up_tokens = nn.Linear(self.num_tokens * config.embedding_size, size, bias=False)
            self.down = nn.Linear(size, rank, bias=False)

    def forward(
        self,
        token_ids: Int[Tensor, "..."],
        features: Float[Tensor, "... hidden"],
        token_embeds: Float[Tensor, "... tokens embed"] | None = None,
    ) -> Tensor:
        """Scores `[..., vocab]` to add to the logits of `features` after the tokens `token_ids`, in the drafter's ids.

        `token_embeds` are those of the last tokens, the newest last, zeros or none for those that a block lacks; only
        the network reads them.
        """
        return self.after_tokens(token_ids, self.prepare(features), token_embeds)

    def prepare(self, features: Float[Tensor, "... hidden"]) -> Float[Tensor, "... prepared"]:
        """What depends on features alone, and is the same after all tokens."""
        gates = 1 + self.gate(features)
        return torch.cat([gates, self.up(self.norm(features))], dim=-1) if self.has_network else gates

    def after_tokens(
        self,
        token_ids: Int[Tensor, "..."],
        prepared: Float[Tensor, "... prepared"],
        token_embeds: Float[Tensor, "... tokens embed"] | None = None,
    ) -> Tensor:
        """The scores, of features that [`Transition.prepare`] has read."""
        scores = self.before(token_ids) * prepared[..., : self.rank]
        if self.has_network:
            assert token_embeds is not None
            missing = self.num_tokens - token_embeds.shape[-2]
            embeds = functional.pad(self.input_norm(token_embeds), (0, 0, missing, 0)).flatten(-2)
            scores = scores + self.down(functional.silu(prepared[..., self.rank :] + self.up_tokens(embeds)))
        return self.after(scores)


ATTENTION_BIAS = 3.0  # of fresh queries and keys
POSITION_SPREAD = 0.3  # of fresh block positions

_ADDED = ("shortcut", "newest", "o_proj", "down_proj", "after")  # linear layers whose output is added as it is

RecurrentState = tuple[Tensor, Tensor]  # hidden and cell, each [recurrent layers, rows, hidden]


class _WithQueriesOf:
    """Attention with queries of rows of their own; projections stay linear layers, which adapters can be put on."""

    def __init__(self, attention: LlamaAttention, rows: Tensor) -> None:
        self._attention = attention
        self._rows = rows

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
        size = config.block_size
        hidden = config.hidden_size
        self.block_position = nn.Embedding(size, hidden)
        self.newest: Any = nn.Linear(hidden, size * hidden, bias=False) if config.newest_row else None

    def forward(  # the layer passes on what it is given
        self, hidden_states: Tensor, *args: Any, block_positions: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The output of attention plus the vectors of position and newest row."""
        added = self.block_position(block_positions)
        attention: Any = self
        if self.newest is not None:
            added = added + self._newest(hidden_states, block_positions)
            attention = _WithQueriesOf(self, hidden_states + added)
        outputs, weights = LlamaAttention.forward(attention, hidden_states, *args, **kwargs)
        return outputs + added, weights

    def _newest(self, states: Tensor, block_positions: Tensor) -> Tensor:
        """The map, for each row's block position, of the last row of its block, or of the last one there is."""
        rows = torch.arange(states.shape[1], device=states.device)
        positions = block_positions.expand(len(states), -1)
        last = (rows + self.config.block_size - 1 - positions).clamp(max=len(rows) - 1)
        maps = self.newest(states).unflatten(-1, (self.config.block_size, -1))
        return maps[torch.arange(len(states), device=states.device)[:, None], last, positions]


class FalconSpecDrafter(DraftVocabulary, GrowingDrafter):
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
    main_input_name = "token_embeds"
    supports_gradient_checkpointing = True
    grows_trees = False
    has_window = True
    _supports_sdpa = True
    _no_split_modules = ["LlamaDecoderLayer"]  # noqa: RUF012  Transformers reads a plain list
    _keys_to_ignore_on_load_unexpected = [r"^recurrence\.weight_hh_l"]  # noqa: RUF012  where no state comes in

    def __init__(self, config: FalconSpecConfig) -> None:
        super().__init__(config)
        self.recurrence = Recurrence(
            config.embedding_size + config.feature_size,
            config.hidden_size,
            num_layers=config.num_recurrent_layers,
            dropout=config.recurrent_dropout if config.num_recurrent_layers > 1 else 0.0,
            batch_first=True,
        )
        if config.recurrence == "token":  # no state comes in, so that its weights would never be read
            for number in range(config.num_recurrent_layers):
                self.recurrence.register_parameter(f"weight_hh_l{number}", None)
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
        self._list_tokens()
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size).requires_grad_(False)
        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> "FalconSpecDrafter":
        """A fresh drafter whose sizes fit `target`, on its device; `options` are fields of [`FalconSpecConfig`]."""
        drafter = cls(FalconSpecConfig.from_target(target, **options))
        drafter._aim_attention()
        drafter._start_at_zero(*_ADDED)
        return drafter.eval().to(device=device_of(target))

    @torch.no_grad()
    def _aim_attention(self) -> None:
        """Start attention that has biases so that head h looks at the row h mod k ahead.

        A row must read the rows that follow it in its block and know its own position there. Attention that starts out
        even over the whole text takes long to find them; see `lab/log/falcon.md` for the measurement.
        """
        config: Any = self.config
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
        phases: Int[Tensor, " rows"],
        is_token: Bool[Tensor, "rows tokens"] | None = None,
        **_: Any,
    ) -> Float[Tensor, "rows tokens hidden"]:
        """Read whole sequences, as in training: the feature expected at token p + k.

        Row p holds the embedding of token p + 1 and the target's feature of token p. Blocks of each text start at
        positions p with p = phase modulo k. Padding, where `is_token` is False, must end a text.
        """
        num_rows, num_tokens, _width = token_embeds.shape
        positions = torch.arange(num_tokens, device=token_embeds.device).expand(num_rows, -1)
        mask = block_causal_mask(block_ends(positions, self.config.block_size, phases), positions)
        if is_token is not None:
            mask = mask & is_token[:, None, :]

        rows = torch.cat([token_embeds, features], dim=-1).to(self.dtype)
        fused = self.recur(rows, None)[0]
        return self.attend(fused, mask, positions, (positions - phases[:, None]) % self.config.block_size)

    def recur(
        self,
        rows: Float[Tensor, "rows tokens fused"],
        state: RecurrentState | None,
        num_tokens: Int[Tensor, "rows 1"] | None = None,
    ) -> tuple[Float[Tensor, "rows tokens hidden"], RecurrentState | None]:
        """The LSTM's outputs from `state` on, and its state after the last row, or after `num_tokens` of each row."""
        if self.config.norm_inputs:
            rows = self._on_one_scale(rows)
        if self.config.recurrence == "token":
            outputs, after = self._recur_afresh(rows), None
        elif num_tokens is None:
            outputs, after = self.recurrence(rows, state)
        else:
            assert state is not None  # of what was read before
            outputs, after = self.recurrence.stepwise(rows, state, num_tokens)
        return (outputs + self.shortcut(rows) if self.config.shortcut else outputs), after

    def _on_one_scale(self, rows: Float[Tensor, "rows tokens fused"]) -> Float[Tensor, "rows tokens fused"]:
        """Rows whose embedding and whose feature have a root mean square of 1 each."""
        embeds, features = rows.tensor_split([self.config.embedding_size], dim=-1)
        embeds = functional.rms_norm(embeds, embeds.shape[-1:], eps=self.config.rms_norm_eps)
        features = functional.rms_norm(features, features.shape[-1:], eps=self.config.rms_norm_eps)
        return torch.cat([embeds, features], dim=-1)

    def _recur_afresh(self, rows: Float[Tensor, "rows tokens fused"]) -> Float[Tensor, "rows tokens hidden"]:
        """The LSTM from a zero state at tokens, as matrix products; recurrent weights and forget gate do nothing."""
        lstm = self.recurrence
        size = self.config.hidden_size
        for layer, (weight, _, input_bias, hidden_bias) in enumerate(lstm.all_weights):
            bias = input_bias + hidden_bias
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
        """What the transition adds to the logits of what it has prepared, after tokens of the block in its own ids."""
        return self.transition.after_tokens(token_ids, prepared, token_embeds)


class FalconCandidateGenerator(PairGenerator):
    """One call's drafting with a [`FalconSpecDrafter`]; all rows in the same passes, each with its own past."""

    drafter: FalconSpecDrafter

    def __init__(self, drafter: FalconSpecDrafter, target: TargetView, max_length: int, rng: torch.Generator) -> None:
        super().__init__(drafter, target, max_length, rng)
        self.least_pairs = self.block_size
        self.predicts_independently = drafter.config.transition_rank is None
        if drafter.config.transition_size is not None:
            self.num_before = drafter.config.transition_tokens
        if drafter.max_depth > self.block_size and drafter.feature_layers != (-1,):
            raise OptionError(
                f"A drafter that reads the hidden states {drafter.feature_layers} predicts the last one only, so that "
                f"it has nothing to feed a second pass: its draft tree must end at depth {self.block_size}, the block "
                f"size, but it reaches depth {drafter.max_depth}."
            )
        self._block_state: RecurrentState | None = None  # after each block of the newest pass

    def fresh_states(self, num_rows: int) -> dict[str, Tensor]:
        """The LSTM's outputs for the newest k - 1 pairs, and its state after them."""
        config = self.drafter.config
        empty = torch.zeros(num_rows, 0, config.hidden_size, dtype=self.drafter.dtype, device=self.drafter.device)
        states = {"tails": empty.new_zeros(num_rows, self.block_size - 1, config.hidden_size)}
        if config.recurrence == "sequence":
            for name in ("hidden", "cell"):
                states[name] = empty.new_zeros(num_rows, config.num_recurrent_layers, config.hidden_size)
        return states

    @property
    def _state(self) -> RecurrentState | None:
        """The LSTM's state after the pairs that were read."""
        carried = self.text.carried
        if "hidden" not in carried:
            return None
        return carried["hidden"].transpose(0, 1).contiguous(), carried["cell"].transpose(0, 1).contiguous()

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:
        """Read new pairs, and old ones again where fewer than k are new: `[rows, 1, k, hidden]` of each last block.

        A block ends at the newest pair of its row. It takes in older pairs where too few are new: what the LSTM gave
        for those is carried on as `tails`, and attention reads them again, now as a part of this block.
        """
        text = self.text
        size = self.block_size
        all_count = text.num_reading is not None and min(text.num_reading) == token_ids.shape[1]
        num_tokens = None if all_count else num
        fused, state = self.run("recur", self._rows(token_ids, features), self._state, num_tokens)
        known = torch.cat([text.carried["tails"].to(fused), fused], dim=1)
        text.carried["tails"].copy_(newest_of(known, num + torch.arange(size - 1, device=num.device)))
        if state is not None:
            hidden, cell = state
            text.carried["hidden"].copy_(hidden.transpose(0, 1))
            text.carried["cell"].copy_(cell.transpose(0, 1))

        width = min(max(token_ids.shape[1], size), self.reach)
        steps = torch.arange(-width, 0, device=num.device)
        length = self.text.cache.lengths + num
        positions = length + steps
        text.assign_slots(positions, (positions >= 0) & (steps >= -num.clamp(min=size)) & (num > 0))

        rows = newest_of(known, num + size - 1 + steps)
        ends = block_ends(positions, size, length[:, 0])
        mask = text.text_mask(positions, ends)
        block_positions = size - 1 - (ends - positions)
        outputs = self.run("attend", rows, mask, positions.clamp(min=0), block_positions, text.cache)
        return outputs[:, None, -size:]

    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:
        """Features `[rows, blocks, k, hidden]` of all blocks of a pass; keeps the LSTM's state after each block."""
        num_rows, blocks, size = token_ids.shape
        fed = features.gather(1, parents[..., None, None].expand(-1, -1, *features.shape[2:]))
        inputs = self._rows(token_ids, fed).flatten(0, 1)
        state = self._state if number == 1 else self._block_state
        if state is not None:  # each block goes on from its parent's state
            state = (_of_blocks(state[0], parents), _of_blocks(state[1], parents))
        # a compiler takes no LSTM, but its steps
        num = None if self.backend is None else self.text.cache.lengths.new_full((len(inputs), 1), size)
        fused, self._block_state = self.run("recur", inputs, state, num)

        block_positions = torch.arange(size, device=fused.device).repeat(num_rows, blocks)
        positions = self.text.cache.lengths + (number - 1) * size + block_positions
        rows = fused.reshape(num_rows, blocks * size, -1)
        mask = self.text.draft_mask(seen, positions)
        outputs = self.run("attend", rows, mask, positions, block_positions, self.text.cache)
        return outputs.reshape(num_rows, blocks, size, -1)

    def prepare(self, features: Tensor) -> Tensor:
        """What the transition makes of features alone."""
        return self.drafter.transition.prepare(self.to_drafter(features))

    def change_after(self, token_ids: Tensor, prepared: Tensor) -> Tensor:
        """What the transition says of the newest tokens of the block."""
        config = self.drafter.config
        embeds = None
        if config.transition_size is not None:
            embeds = self.embed(token_ids[..., -self.num_before :])
        newest = token_ids[..., -1]
        if self.draft_ids is not None:
            newest = self.draft_ids[newest]
        return self.run("change_after", newest, prepared, embeds)

    def _rows(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """Input rows: embedding and feature, in the drafter's type and device."""
        return torch.cat([self.embed(token_ids), self.to_drafter(features)], dim=-1)


def _of_blocks(states: Tensor, blocks: Tensor) -> Tensor:
    """Of states `[layers, rows * blocks, hidden]` those of the blocks `[rows, wanted]` of each row."""
    by_row = states.unflatten(1, (len(blocks), -1))
    indices = blocks[None, ..., None].expand(len(states), -1, -1, states.shape[-1])
    return by_row.gather(2, indices).flatten(1, 2).contiguous()


FalconSpecDrafter.generator_class = FalconCandidateGenerator

PAPER_DEPTH = 8
# Children of a node, which is named by the ranks on the way to it. A node that is not here has none.
_CHILDREN = {
    (): 20,
    (0,): 11,
    (1,): 4,
    (2,): 4,
    (0, 0): 7,
    (0, 1): 8,
    (0,) * 3: 10,
    (0,) * 4: 10,
    (0,) * 5: 4,
    (0,) * 6: 4,
    (0,) * 7: 3,
}
# Below each of these, one token follows another down to the last depth.
_CHAINS = ((1, 0), (2, 0), (0, 1, 0), (0, 2), (0, 3), (0, 0, 0, 1))


def paper_tree(block_size: int = 2) -> DraftTree:
    """The tree of figure 6, for Llama targets; its first nodes are the likeliest, so that a part of it is good, too.

    The figure draws how many children each node has, and the text says that m children are the m most likely tokens.
    The authors' list (`kmask2_8layer_tree_3` of `models/choices.py`, Bestpay-inc/Falcon) differs in one point: the
    eight children of the second token after the first have the sibling ranks 0 and 3 to 9 there; here they are 0 to 7.

    The paper draws none for blocks of 3 and 4 tokens, but says that they reach depths of 6 and 8: for blocks of more
    than two tokens this is figure 6 as deep as whole blocks reach.
    """
    depth = PAPER_DEPTH // block_size * block_size or PAPER_DEPTH
    paths = sorted((path for path in _paths() if len(path) <= depth), key=lambda path: (sum(path) + len(path), path))
    indices = {path: index for index, path in enumerate([(), *paths])}
    parents = [indices[path[:-1]] for path in paths]
    return DraftTree.from_lists([-1, *parents], [-1, *(path[-1] for path in paths)])


def _paths() -> Iterator[tuple[int, ...]]:
    """The ranks on the way to each node but the root."""
    for parent, num_children in _CHILDREN.items():
        yield from ((*parent, rank) for rank in range(num_children))
    for start in _CHAINS:
        yield from ((*start, *(0,) * length) for length in range(1, PAPER_DEPTH - len(start) + 1))
