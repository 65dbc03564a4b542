"""The decoder layers of Eagle: a Llama layer without its first norm, and one that reads embedding and state."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm

from .configuration_eagle import EagleConfig


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
        assert config.embedding_size is not None  # the configuration fills it in
        self.input_layernorm = LlamaRMSNorm(config.embedding_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = EagleAttention(config, config.embedding_size + config.hidden_size)
        self.norm_before_residual = config.norm_before_residual

    def forward(  # type: ignore[override]  # reads two inputs
        self, hidden_states: Tensor, token_embeds: Tensor, **attention_inputs: Any
    ) -> Tensor:
        """The next state of each row, before any final norm."""
        normed = self.hidden_norm(hidden_states)
        rows = torch.cat([self.input_layernorm(token_embeds), normed], dim=-1)
        read, _weights = self.self_attn(hidden_states=rows, **attention_inputs)
        states = (normed if self.norm_before_residual else hidden_states) + read
        return states + self.mlp(self.post_attention_layernorm(states))
