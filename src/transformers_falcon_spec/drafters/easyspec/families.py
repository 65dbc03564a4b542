"""Which language models can draft layer-parallel, and how their layers are put together from their own modules.

Attention of a layer must be a module of its own that reads a norm of the layer's input, and what it gives must be
added to the input; then its input can be replaced by an older one.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import OptionError
from ...generation.model_parts import decoder_of, layer_kinds
from ...transformers_versions import CACHE

_MOVING_ROPES = ("dynamic", "longrope")  # their frequencies change with the length of the text


@dataclass(frozen=True)
class Family:
    """How the layers of one family are put together."""

    attention: str = "self_attn"  # its module in a layer
    output: str = "o_proj"  # its last projection
    cache: str = CACHE  # what layers call the cache
    final_norm: str = "norm"  # before the head
    gain_offset: float = 0.0  # what norms add to their weight
    mlp_reads_input_norm: bool = False  # the MLP runs in parallel to attention and reads the same norm


FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), Family()),
    "gemma": Family(gain_offset=1.0),
    "phi": Family(output="dense", final_norm="final_layernorm", mlp_reads_input_norm=True),
    "gpt_neox": Family(attention="attention", output="dense", cache="layer_past", final_norm="final_layer_norm"),
}


def check_family(config: PreTrainedConfig) -> None:
    """Refuse a model of another family, or whose positions change with the length of the text: [`OptionError`]."""
    if config.model_type not in FAMILIES:
        raise OptionError(
            f"A `LayerParallelDrafter` wraps models of {sorted(FAMILIES)}, whose layers it knows how to put together, "
            f"but this one is a `{config.model_type}`. Stock assisted generation takes it as it is."
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _MOVING_ROPES:
        raise OptionError(
            "The rotary positions of a draft model must not change with the length of the text, but its `rope_type` "
            f"is {rope!r}: what it has read would have to be read again. Take a model with another one."
        )


@dataclass(frozen=True)
class Inputs:
    """The inputs that all layers share in one forward."""

    masks: dict[str, Tensor]  # additive [rows, 1, tokens, slots], by kind of attention
    positions: Tensor  # [rows, tokens]
    rotary: tuple[Tensor, Tensor]  # cosines and sines [rows, tokens, size]
    cache: Any


class LayeredModel:
    """A causal language model taken apart. Holds no weights of its own: all that computes are the model's modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.family = model, FAMILIES[model.config.model_type]
        decoder: Any = decoder_of(model)
        self.layers, self.rotary = decoder.layers, decoder.rotary_emb
        self.final_norm: nn.Module = getattr(decoder, self.family.final_norm)
        types: Any = getattr(model.config, "layer_types", None)
        self.layer_types: list[str] = list(types or ["full_attention"] * len(self.layers))
        self.kinds = layer_kinds(model.config)

    def attention(self, index: int) -> Any:
        """The attention of a layer."""
        return getattr(self.layers[index], self.family.attention)

    def read(self, index: int, states: Tensor, inputs: Inputs) -> Tensor:
        """A whole layer, as the model itself runs it."""
        return self.layers[index](states, use_cache=True, **self._arguments(index, inputs))

    def attend(self, index: int, states: Tensor, inputs: Inputs) -> Tensor:
        """The output of a layer's attention over a group's input."""
        normed = self.layers[index].input_layernorm(states)
        return self.attention(index)(hidden_states=normed, **self._arguments(index, inputs))[0]

    def finish(self, index: int, states: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: `attended` is added to the states, which the MLP then reads as in the model itself."""
        layer, read = self.layers[index], states + attended
        if self.family.mlp_reads_input_norm:
            return read + layer.mlp(layer.input_layernorm(states))
        is_parallel = getattr(layer, "use_parallel_residual", False)
        return read + layer.mlp(layer.post_attention_layernorm(states if is_parallel else read))

    def _arguments(self, index: int, inputs: Inputs) -> dict[str, Any]:
        return {
            "attention_mask": inputs.masks[self.layer_types[index]],
            "position_ids": inputs.positions,
            "position_embeddings": inputs.rotary,
            self.family.cache: inputs.cache,
        }
