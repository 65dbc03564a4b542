"""Eagle: one decoder layer drafts token by token from the target's features, then from its own states.

The layer reads pairs of token embedding and feature, or of embedding and state. The embedding is the target's; in
version 1 the head is, too. A pass reads the new pairs, then a tree grows or a static one is drafted, a depth a pass.
Sources: arXiv 2401.15077 (version 1), arXiv 2503.01840 (version 3).
"""

from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils.generic import ModelOutput

from ..core.masks import additive
from ..core.options import option
from ..errors import OptionError, quoted
from ..transformers_versions import CACHE
from .base import GrowingDrafter
from .config_fields import PairConfig
from .draft_vocabulary import DraftVocabulary
from .tree_drafting.proposing import PairGenerator
from .tree_drafting.text import newest_of

VERSIONS = (1, 3)
OF_VERSION_3 = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MIN_LAYERS_AS_PUBLISHED = 7  # with fewer, two of the published three layers are one


@strict
class EagleConfig(PairConfig):
    """Configuration of [`EagleDrafter`]; fields of its one decoder layer are those of `LlamaConfig`.

    It has the fields of [`~drafters.config_fields.PairConfig`], too: `feature_layers`, `feature_size`,
    `embedding_size`, `draft_vocab_size`, `draft_tree`, `confidence_temperatures`, and the target that it was trained
    for.

    Args:
        version (`int`, *optional*, defaults to 1): 1 is Eagle-1 and Eagle-2, whose weights are alike; 3 is Eagle-3.
        qkv_bias (`bool`, *optional*, defaults to `False`): Biases on queries, keys and values, as for Qwen2.
        fc_bias (`bool`, *optional*): A bias on `fc`; None is True in version 1 and False in version 3.
        norm_before_residual (`bool`, *optional*, defaults to `False`): Version 3: the residual is the normed state,
            as in checkpoints of speculators.
        norm_before_fc (`bool`, *optional*, defaults to `False`): Version 3: one norm over all features before `fc`.
        fc_norm (`bool`, *optional*, defaults to `False`): Eagle-3.1: a norm for each layer's feature before `fc`.
        norm_output (`bool`, *optional*, defaults to `False`): Eagle-3.1: the state fed back is the normed one.

    Example:

    ```python
    >>> config = EagleConfig(version=3, hidden_size=64, num_attention_heads=4, feature_layers=[1, 2, 3])
    >>> config.feature_size, config.fc_bias
    (192, False)

    ```
    """

    model_type = "eagle_spec"

    num_hidden_layers: int = option(1, one_of=(1,))
    version: int = option(1, one_of=VERSIONS)
    qkv_bias: bool = False
    fc_bias: bool | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        if self.fc_bias is None:
            self.fc_bias = self.version == 1

        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        given = [name for name in OF_VERSION_3 if getattr(self, name)]
        if self.version == 1 and given:
            raise OptionError(f"{quoted(given)} must be left out unless `version` is 3.")

        if self.version == 1 and self.feature_size != self.hidden_size:
            raise OptionError(
                "Version 1 feeds itself what it predicts, so `feature_layers` must be [-1] and `feature_size` the "
                f"hidden size, {self.hidden_size}, but they are {list(self.feature_layers)} and {self.feature_size}. "
                "Version 3 reads others."
            )

    @classmethod
    def default_feature_layers(cls, num_layers: int, options: dict[str, Any]) -> tuple[int, ...]:
        """Version 1 reads the input of the head, version 3 what [`eagle3_feature_layers`] names."""
        return eagle3_feature_layers(num_layers) if options.get("version", cls.version) == VERSIONS[1] else (-1,)


def eagle3_feature_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states that Eagle-3 reads, early, middle and late; fewer of a target with fewer than four layers.

    Source: the code published with arXiv 2503.01840: 2, n // 2 and n - 3.
    """
    if num_layers >= MIN_LAYERS_AS_PUBLISHED:
        return (2, num_layers // 2, num_layers - 3)

    return tuple(sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1}))


class EagleAttention(LlamaAttention):
    """Llama's attention over inputs of another width, with biases on queries, keys and values alone if asked for."""

    def __init__(self, config: EagleConfig, input_size: int) -> None:
        super().__init__(config, layer_idx=0)
        has_bias = config.qkv_bias or config.attention_bias
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(input_size, getattr(self, name).out_features, bias=has_bias))


class FeatureLayer(LlamaDecoderLayer):
    """Version 1: nothing is normed before attention, for `fc` mixes what comes in."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, layer_idx=0)
        self.input_layernorm = nn.Identity()  # type: ignore[assignment]  # takes and gives what a norm does
        self.self_attn = EagleAttention(config, config.hidden_size)


class StateLayer(LlamaDecoderLayer):
    """Version 3: attention reads the normed embedding and the normed state; the residual is the state alone."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, layer_idx=0)
        self.input_layernorm = LlamaRMSNorm(config.embedding_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = EagleAttention(config, config.embedding_size + config.hidden_size)
        self.norm_before_residual = config.norm_before_residual

    def forward(  # reads two inputs
        self, hidden_states: Tensor, token_embeds: Tensor, **attention_inputs: Any
    ) -> Tensor:
        """The next state of each row, before any final norm."""
        normed = self.hidden_norm(hidden_states)
        rows = torch.cat([self.input_layernorm(token_embeds), normed], dim=-1)
        read, _weights = self.self_attn(hidden_states=rows, **attention_inputs)
        states = (normed if self.norm_before_residual else hidden_states) + read
        return states + self.mlp(self.post_attention_layernorm(states))


@dataclass
class EagleOutput(ModelOutput):
    """The output of [`EagleDrafter`] for whole sequences."""

    # [rows, steps, tokens, hidden] version 1: the feature expected at token p + 1 + step; 3: what it comes from
    states: Tensor | None = None
    logits: Tensor | None = None  # [counted, draft_vocab] version 3: of the rows that count, in their order


class EagleDrafter(DraftVocabulary, GrowingDrafter):
    """Drafts one token a pass from the target's features, then from its own states.

    Row p of the input holds the embedding of token p + 1 and the feature of token p; row p of the output is what token
    p + 2 follows from.

    Example:

    ```python
    >>> config = EagleConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4)
    >>> EagleDrafter(config)(torch.zeros(1, 5, 32), torch.zeros(1, 5, 32)).states.shape
    torch.Size([1, 1, 5, 32])

    ```
    """

    config: EagleConfig
    config_class = EagleConfig
    main_input_name = "token_embeds"
    default_depth = 4
    has_window = True
    _supports_sdpa = True
    _no_split_modules = ["FeatureLayer", "StateLayer"]  # noqa: RUF012  Transformers reads a plain list

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        eps = config.rms_norm_eps
        is_first = config.version == 1

        read_size = config.feature_size + (config.embedding_size if is_first else 0)
        self.fc = nn.Linear(read_size, hidden, bias=bool(config.fc_bias))
        self.layer = FeatureLayer(config) if is_first else StateLayer(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)

        if not is_first:
            self.norm = LlamaRMSNorm(hidden, eps=eps)
            self.lm_head = nn.Linear(hidden, config.num_draftable_tokens, bias=False)

        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(config.feature_size, eps=eps)

        if config.fc_norm:
            width = config.feature_size // len(config.feature_layers)
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps=eps) for _ in config.feature_layers)

        self._list_tokens()
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size).requires_grad_(False)

        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> "EagleDrafter":
        """A fresh drafter whose sizes fit `target`, on its device; `options` are fields of [`EagleConfig`]."""
        drafter = super().from_target(target, **options)
        if drafter.config.version == 1:  # version 3 has a head of its own behind a norm
            drafter._start_at_zero("fc", "o_proj", "down_proj")

        return drafter

    def forward(
        self,
        token_embeds: Float[Tensor, "rows tokens embed"],
        features: Float[Tensor, "rows tokens feature"],
        num_steps: int = 1,
        is_counted: Bool[Tensor, "rows steps tokens"] | None = None,
        **_: Any,
    ) -> EagleOutput:
        """Read whole sequences and draft on from every position of them, as in training: the training-time test.

        Step 0 is the pass over true features. In step j the chain that starts at position p reads the embedding of
        token p + 1 + j and its own state of step j - 1, at position p + j; it sees the true rows up to p and its
        own steps. Padding must be on the right, where no row before it looks.

        Row p holds the embedding of token p + 1 and the target's feature of token p. Logits are made where
        `is_counted`, which is everywhere if None.
        """
        positions = torch.arange(token_embeds.shape[1], device=token_embeds.device)[None]
        mask = positions[:, None] <= positions[..., None]
        own = torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device).expand_as(mask)

        embeds = token_embeds.to(self.dtype)
        states = self.fuse(features.to(self.dtype))
        cache = DynamicCache()
        found = []
        for step in range(num_steps):
            if step:
                embeds = torch.cat([embeds[:, 1:], torch.zeros_like(embeds[:, :1])], dim=1)
                mask = torch.cat([mask, own], dim=-1)

            found.append(self.attend(embeds, states, mask, positions + step, cache))
            states = self.fed_back(found[-1])

        outputs = torch.stack(found, dim=1)
        if self.config.version == 1:
            return EagleOutput(outputs)

        rows = outputs.flatten(0, 2) if is_counted is None else outputs[is_counted]
        return EagleOutput(outputs, self.draft_logits(rows))

    def fuse(self, features: Float[Tensor, "... feature"]) -> Float[Tensor, "... hidden"]:
        """The state that a row reads with its embedding: made of the target's features, or in version 1 these."""
        if self.config.version == 1:
            return features

        if self.config.norm_before_fc:
            features = self.input_norm(features)

        if self.config.fc_norm:
            parts = list(features.chunk(len(self.fc_norm), dim=-1))
            for number, norm in enumerate(self.fc_norm):
                parts[number] = norm(parts[number])

            features = torch.cat(parts, dim=-1)

        return self.fc(features)

    def attend(
        self,
        token_embeds: Float[Tensor, "rows tokens embed"],
        states: Float[Tensor, "rows tokens hidden"],
        mask: Bool[Tensor, "masks tokens keys"],
        positions: Int[Tensor, "_ tokens"],
        cache: Cache | None = None,
    ) -> Float[Tensor, "rows tokens hidden"]:
        """The layer over rows of embedding and state; keys and values go to `cache`, where one is given."""
        inputs = self.attention_inputs(states, mask, positions, cache)
        if self.config.version == 1:
            return self.layer(self.fc(torch.cat([token_embeds, states], dim=-1)), **inputs)

        return self.layer(states, token_embeds, **inputs)

    def attention_inputs(self, states: Tensor, mask: Tensor, positions: Tensor, cache: Cache | None) -> dict[str, Any]:
        """What a layer takes besides rows, as [`attend`] does."""
        rotary = self.rotary_emb(states, positions)
        return {"attention_mask": additive(mask, states.dtype), "position_embeddings": rotary, CACHE: cache}

    def fed_back(self, states: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        """The state that the next row of a chain reads instead of a feature."""
        return self.norm(states) if self.config.norm_output else states

    def draft_logits(self, states: Float[Tensor, "... hidden"]) -> Float[Tensor, "... vocab"]:
        """Version 3: logits over the tokens that can be drafted, in float32."""
        return self.lm_head(self.norm(states)).float()


class EagleCandidateGenerator(PairGenerator):
    """Drafting with an [`EagleDrafter`] or `MtpDrafter` during one call; rows share passes, each has its own tree."""

    drafter: Any

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:
        """Read new pairs: the newest state of each row, `[rows, 1, 1, hidden]`."""
        token_ids, features, num = self.newest_within_reach(token_ids, features, num)
        positions = self.text.take_slots(token_ids.shape[1], num)
        mask = self.text.text_mask(positions, positions)
        inputs = self.run("fuse", self.to_drafter(features))
        states = self.run("attend", self.embed(token_ids), inputs, mask, positions, self.text.cache)
        return newest_of(states, num - 1)[:, None]

    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:
        """States `[rows, nodes, 1, hidden]` of drafted nodes of one depth, from tokens and parents' states."""
        states = features[:, :, 0].gather(1, parents[..., None].expand(-1, -1, features.shape[-1]))
        positions = (self.text.cache.lengths + number - 1).expand(-1, states.shape[1])

        embeds = self.embed(token_ids[..., 0])
        fed_back = self.run("fed_back", states)
        mask = self.text.draft_mask(seen, positions)
        states = self.run("attend", embeds, fed_back, mask, positions, self.text.cache)
        return states[:, :, None]

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of states: of the drafter's own head where it has one."""
        has_own = hasattr(self.drafter, "lm_head")
        return self.run("draft_logits", features) if has_own else super().draft_logits(features)


EagleDrafter.generator_class = EagleCandidateGenerator
