"""A language model taken apart, and the attention of a group of its layers over the same input.

Attention of a layer must be a module of its own that reads a norm of the layer's input, and what it gives must be
added to the input; then its input can be replaced by an older one. A group attends at once on one device, or each
layer on a process of its own.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ...errors import OptionError
from ...generation.distributed import Processes
from ...generation.model_parts import decoder_of, layer_kinds
from ...generation.slot_cache import SlotCache
from ...generation.tree_attention import grouped_sdpa
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


class GroupSlice:
    """A cache as one layer of a group sees it: its layer `number` keeps the heads of all `layers`, read in order."""

    def __init__(self, cache: SlotCache, number: int, layers: Sequence[int]) -> None:
        self._cache = cache
        self._number = number
        self._layers = list(layers)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new states `[rows, layers * heads, tokens, size]` of all layers; returns the states of all tokens."""
        return self._cache.update(keys, values, self._number)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add one layer's new states `[rows, heads, tokens, size]`; returns those of all its tokens."""
        layer = self._cache.layers[self._number]
        first_head = self._layers.index(layer_idx) * keys.shape[1]
        num_heads = len(self._layers) * keys.shape[1]
        return layer.update_heads(first_head, num_heads, keys, values)


_VERSIONS = count(1)  # of fused weights: no two have the same
_HEAD_NORMS = (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm"))


class Backend(ABC):
    """How the layers of a group attend, each with its own index in the cache unless a backend says otherwise."""

    version = 0  # of weights of its own

    def __init__(self, layered: LayeredModel, groups: Sequence[Sequence[int]]) -> None:
        self.layered, self.groups = layered, groups

    @property
    def num_cache_layers(self) -> int:
        """Layers that a cache needs."""
        return len(self.layered.layers)

    def cache_of(self, number: int, cache: Any) -> Any:  # noqa: ARG002  others need to know the group
        """The cache as the layers of a group use it."""
        return cache

    @abstractmethod
    def attend(self, number: int, states: Tensor, inputs: Inputs) -> Sequence[Tensor]:
        """Attention outputs `[rows, tokens, hidden]` of a group's layers, all over the same `states`."""


class FusedBackend(Backend):
    """All layers of a group in one projection, one attention over all their heads and one projection back.

    The cache has one entry for each group, which holds the heads of its layers one after the other.
    """

    def __init__(self, layered: LayeredModel, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(layered, groups)
        self._fused = {number: FusedAttention(layered, group) for number, group in enumerate(groups) if len(group) > 1}
        self.version = next(_VERSIONS)

    @property
    def num_cache_layers(self) -> int:
        """Layers that a cache needs: one for each group."""
        return len(self.groups)

    def cache_of(self, number: int, cache: Any) -> Any:
        """The part of the group's cache entry that belongs to each layer."""
        return GroupSlice(cache, number, self.groups[number])

    def attend(self, number: int, states: Tensor, inputs: Inputs) -> Sequence[Tensor]:
        """Attention outputs of a group's layers, as layer after layer gives them up to rounding."""
        return self._fused[number](states, inputs).unbind()


class FusedAttention:
    """The attention layers of one group as one.

    Norms of the same input differ in their gains alone, and those go into the projections: W (g * x + b) = (W diag g)
    x + W b.
    """

    def __init__(self, layered: LayeredModel, group: Sequence[int]) -> None:
        self.attentions = [layered.attention(index) for index in group]
        self._kinds = [layered.layer_types[index] for index in group]
        norms, offset = [layered.layers[index].input_layernorm for index in group], layered.family.gain_offset
        self._norm = _without_gain(norms[0], offset)
        parts = [
            [_folded(*part, norm, offset) for part in _projections(attention)]
            for attention, norm in zip(self.attentions, norms, strict=True)
        ]
        stacked = [part[kind] for kind in range(3) for part in parts]  # all queries, then all keys, then all values
        self._weight, self._bias = (torch.cat(joined) for joined in zip(*stacked, strict=True))
        self._sizes = [sum(len(part[kind][0]) for part in parts) for kind in range(3)]
        outputs = [_matrix(getattr(attention, layered.family.output)) for attention in self.attentions]
        self._output_weight = torch.stack([weight.T for weight, _ in outputs])  # [layers, heads * size, hidden]
        self._output_bias = torch.stack([bias for _, bias in outputs])[:, None]
        self._head_size = self._output_weight.shape[1] // layered.model.config.num_attention_heads
        self._head_norms = [_HeadNorm.of(self.attentions, names) for names in _HEAD_NORMS]

    def __call__(self, states: Tensor, inputs: Inputs) -> Tensor:
        """`[layers, rows, tokens, hidden]` of `states` `[rows, tokens, hidden]`; keys and values go to the cache."""
        projected = functional.linear(self._norm(states), self._weight, self._bias)
        queries, keys, values = (
            part.unflatten(-1, (-1, self._head_size)) for part in projected.split(self._sizes, dim=-1)
        )
        normed = ((queries, self._head_norms[0]), (keys, self._head_norms[1]))
        queries, keys = ((part if norm is None else norm(part)).transpose(1, 2) for part, norm in normed)
        queries, keys = _rotated(queries, keys, inputs.rotary)
        keys, values = inputs.cache.extend(keys, values.transpose(1, 2))
        first = self.attentions[0]
        attended, _ = grouped_sdpa(
            first, queries, keys, values, self._mask(inputs, queries.shape[1]), scaling=first.scaling
        )  # [rows, tokens, layers * heads, size]
        by_layer = attended.unflatten(2, (len(self.attentions), -1)).flatten(3).movedim(2, 0)
        outputs = torch.baddbmm(self._output_bias, by_layer.flatten(1, 2), self._output_weight)
        return outputs.unflatten(1, states.shape[:2])

    def _mask(self, inputs: Inputs, num_heads: int) -> Tensor:
        """One mask for all heads, or one for each where layers of the group see differently far."""
        if len(set(self._kinds)) == 1:
            return inputs.masks[self._kinds[0]]
        heads = num_heads // len(self._kinds)
        return torch.cat([inputs.masks[kind].expand(-1, heads, -1, -1) for kind in self._kinds], dim=1)


class _HeadNorm:
    """Norms of queries or keys, a gain for each layer, over heads `[rows, tokens, layers * heads, size]`."""

    def __init__(self, norms: Sequence[Any]) -> None:
        self._norm = _without_gain(norms[0], offset=0.0)
        self._gains = torch.stack([norm.weight.detach() for norm in norms])[:, None]  # [layers, 1, size]
        biases = [norm.bias.detach() for norm in norms if getattr(norm, "bias", None) is not None]
        self._biases = torch.stack(biases)[:, None] if biases else 0.0

    @classmethod
    def of(cls, attentions: Sequence[Any], names: Sequence[str]) -> "_HeadNorm | None":
        """The norms of these names; None where there is none."""
        found = [getattr(attention, name, None) for attention in attentions for name in names]
        norms = [norm for norm in found if norm is not None]
        return cls(norms) if norms else None

    def __call__(self, heads: Tensor) -> Tensor:
        by_layer = self._norm(heads).unflatten(2, (len(self._gains), -1))
        return (self._gains * by_layer + self._biases).flatten(2, 3)


def _projections(attention: Any) -> list[tuple[Tensor, Tensor]]:
    """Weights `[heads * size, hidden]` and biases of queries, keys and values."""
    if not hasattr(attention, "query_key_value"):
        return [_matrix(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")]
    packed = _matrix(attention.query_key_value)  # of each head its query, key and value
    weights, biases = (part.unflatten(0, (-1, 3, attention.head_size)) for part in packed)
    return [(weights[:, kind].flatten(0, 1), biases[:, kind].flatten()) for kind in range(3)]


def _matrix(linear: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of a projection, zeros where it has none; quantised ones are refused."""
    if type(linear) is not nn.Linear:
        raise OptionError(
            '`backend="fused"` needs projections that are plain matrices, but the draft model has a '
            f"`{type(linear).__name__}`. Let each layer be a group of its own: `group_size=1`."
        )
    weight = linear.weight.detach()
    return weight, weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()


def _without_gain(norm: nn.Module, offset: float) -> Any:
    """A copy of a norm that only norms."""
    unit: Any = copy.deepcopy(norm).requires_grad_(False)
    unit.weight.fill_(1.0 - offset)
    if getattr(unit, "bias", None) is not None:
        unit.bias.zero_()
    return unit


def _folded(weight: Tensor, bias: Tensor, norm: Any, offset: float) -> tuple[Tensor, Tensor]:
    """A projection that takes over gain and bias of the norm before it."""
    shift = getattr(norm, "bias", None)
    bias = bias if shift is None else bias + weight @ shift.detach()
    return weight * (norm.weight.detach() + offset), bias


def _rotated(queries: Tensor, keys: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotary positions on the first entries of every head, as many as there are angles."""
    size = rotary[0].shape[-1]
    query, key = apply_rotary_pos_emb(queries[..., :size], keys[..., :size], *rotary)
    if size == queries.shape[-1]:
        return query, key
    return torch.cat([query, queries[..., size:]], dim=-1), torch.cat([key, keys[..., size:]], dim=-1)


def weights_state(model: nn.Module) -> list[tuple[Any, ...]]:
    """A state that changes when a weight is replaced or written to.

    Writes in `inference_mode` and to `weight.data`, as by PEFT, are not counted; a value of each weight shows most.
    """
    weights = list(model.parameters())
    values = torch.stack([weight.detach().flatten()[weight.numel() // 2].float() for weight in weights]).tolist()
    return [
        (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version, value)
        for weight, value in zip(weights, values, strict=True)
    ]


class DistributedBackend(Backend):
    """The layers of a group on several processes, each of which has the whole model; one exchange for each group.

    Of a group each process takes the same number of layers, in their order, the last ones maybe fewer or none. Only it
    has their drafted keys and values; what was read exactly is on every process.
    """

    def __init__(self, layered: LayeredModel, groups: Sequence[Sequence[int]], processes: Processes) -> None:
        super().__init__(layered, groups)
        self.processes, num_layers = processes, len(layered.layers)
        if processes.num > num_layers:
            raise OptionError(
                f"There must be no more processes than layers, but {processes.num} processes are to draft with a "
                f"model of {num_layers} layers. Start fewer processes, or set "
                '`drafter.config.backend = "fused"` on all of them.'
            )

    def attend(self, number: int, states: Tensor, inputs: Inputs) -> Sequence[Tensor]:
        """The attention of a group's layers, each computed by one process."""
        group = self.groups[number]
        num_own = layers_per_process(len(group), self.processes.num)
        part = states.new_zeros(num_own, *states.shape)
        for offset, index in enumerate(group[self.processes.process_rank * num_own :][:num_own]):
            part[offset] = self.layered.attend(index, states, inputs)
        return self.processes.all_gather(part)[: len(group)].unbind()


def layers_per_process(group_size: int, num_processes: int) -> int:
    """How many layers of a group a process computes at most."""
    return -(-group_size // num_processes)
