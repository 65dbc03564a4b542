"""EasySpec: layer-parallel drafting with a stock language model (arXiv 2502.02493).

The middle layers of a language model compute attention in groups, from the same input. Only attention reads the older
input; MLPs stay in order and read what came before them (section 4). A group attends at once on one device, or each
layer on a process of its own.

Drafting takes one exact pass over new text, then a tree, one depth a pass, with layers in groups. The exact pass also
reads what was kept of the last draft, whose rough keys and values are dropped: the paper's calibration (section 4.3).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from typing_extensions import Self

from ..core.masks import additive
from ..core.options import option
from ..core.tree import DraftTree
from ..errors import OptionError
from ..generation.capture.eligibility import obstacle_in
from ..generation.distributed import SINGLE_PROCESS, Processes, ProcessGroup, named_options
from ..generation.drafting import Committed, Draft, DraftBudget, Kept, TargetView
from ..generation.head import apply_head
from ..generation.model_parts import decoder_of, layer_kinds
from ..generation.slot_cache import SlotCache
from ..generation.tree_attention import grouped_sdpa, tree_attention
from ..provenance import weights_fingerprint
from ..transformers_versions import CACHE
from .base import GrowingDrafter
from .config_fields import check_temperatures, context_of
from .tree_drafting.proposing import SWITCHING, PairGenerator
from .tree_drafting.text import newest_of
from .whole_model import WholeModelConfig, WholeModelDrafter, shared_vocabulary

BACKENDS = ("fused", "distributed")
SHALLOW, SHALLOW_SIZE, DEFAULT_SIZE = 16, 2, 4  # arXiv 2502.02493, table 1
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose layers add what attention gives to their input


@strict
class LayerParallelConfig(WholeModelConfig):
    """Configuration of [`LayerParallelDrafter`].

    It has the fields of [`~drafters.whole_model.WholeModelConfig`], too: `draft_config`, `vocab_size`,
    `draft_vocab_size` and `target_name_or_path`.

    Args:
        layer_groups (`list[list[int]]`, *optional*):
            Layers that attend at once, all layers in their order; the first and the last one each alone. Without
            any they are groups of 2 in models of up to 16 layers, else of 4.
        backend (`str`, *optional*, defaults to `"fused"`):
            `"fused"` computes the attention of a group at once; `"distributed"` spreads its layers over the processes
            that `torchrun` started, all of which must make the same calls. The results are the same to rounding.
        timeout_seconds (`float`, *optional*, defaults to 120): How long processes wait for each other, where there are
            several.
        draft_tree (`dict`, *optional*): `{"parents": [...], "ranks": [...]}`; the static tree; None is a chain.
        confidence_temperatures (`dict`, *optional*): As in `PairConfig` of Falcon and Eagle.

    Raises:
        [`OptionError`]: an option out of range, or a family that cannot be wrapped.

    Example:

    ```python
    >>> from transformers import LlamaConfig
    >>> config = LayerParallelConfig(draft_config=LlamaConfig(num_hidden_layers=6, vocab_size=100), vocab_size=128)
    >>> config.layer_groups, config.draft_vocab_size
    ([[0], [1, 2], [3, 4], [5]], 100)

    ```
    """

    model_type = "layer_parallel_spec"

    layer_groups: list[list[int]] = option([])
    backend: str = option("fused", one_of=BACKENDS)
    timeout_seconds: float | int = option(120, above=0)
    draft_tree: dict[str, Any] | None = option(None, check=DraftTree.from_json)
    confidence_temperatures: dict[str, Any] | None = None

    def fill_in(self) -> None:
        """Set the groups, of a model whose layers can be run apart."""
        check_family(self.draft_config)
        if not self.layer_groups:
            self.layer_groups = build_groups(self.draft_config.num_hidden_layers)

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        check_groups(self.layer_groups, self.draft_config.num_hidden_layers)
        check_temperatures(self.confidence_temperatures, block_size=1)


def build_groups(num_layers: int, group_size: int | None = None) -> list[list[int]]:
    """Groups of `group_size` layers; the first and the last layer stand alone.

    Where the layers between those two make whole groups, these follow each other from layer 1 on, as in the paper's
    model of 16 layers; else groups end before multiples of `group_size`, as in its models of 28 and 32. Left out it is
    2 for models of up to 16 layers, else 4, as in the paper; 1 drafts as the model itself does.

    Example:

    ```python
    >>> build_groups(10, 4)
    [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
    >>> build_groups(12, 4)
    [[0], [1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11]]

    ```
    """
    default = SHALLOW_SIZE if num_layers <= SHALLOW else DEFAULT_SIZE
    group_size = default if group_size is None else group_size
    if group_size < 1:
        raise OptionError(f"`group_size` must be at least 1, but it is {group_size}.")

    is_even = (num_layers - 2) % group_size == 0
    groups = [[0]]
    start = 1
    while start < num_layers - 1:
        end = start + group_size if is_even else (start // group_size + 1) * group_size
        end = min(end, num_layers - 1)
        groups.append(list(range(start, end)))
        start = end

    return groups if num_layers == 1 else [*groups, [num_layers - 1]]


def check_groups(groups: Sequence[Sequence[int]], num_layers: int) -> None:
    """Refuse groups that do not divide the layers in their order, or that hold the first or last: [`OptionError`]."""
    layers = list(chain.from_iterable(groups))
    is_whole = layers == list(range(num_layers)) and all(groups)
    if not is_whole or len(groups[0]) > 1 or len(groups[-1]) > 1:
        raise OptionError(
            f"`layer_groups` must hold each of the {num_layers} layers once and in order, the first and the last one "
            f"each in a group of its own, for drafts suffer most from errors there, but they are {list(groups)}. "
            "Leave them out to get the default ones."
        )


# The wrapped model, taken apart


def check_family(config: PreTrainedConfig) -> None:
    """Refuse a model of another family, or whose positions change with the length of the text: [`OptionError`]."""
    if config.model_type not in FAMILIES:
        raise OptionError(
            f"A `LayerParallelDrafter` wraps models of {sorted(FAMILIES)}, whose layers it knows how to put together, "
            f"but this one is a `{config.model_type}`. Stock assisted generation takes it as it is."
        )

    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in SWITCHING:
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
        decoder: Any = decoder_of(model)
        self.model = model
        self.layers = decoder.layers
        self.rotary = decoder.rotary_emb
        self.final_norm: nn.Module = decoder.norm
        types: Any = getattr(model.config, "layer_types", None)
        self.layer_types: list[str] = list(types or ["full_attention"] * len(self.layers))
        self.kinds = layer_kinds(model.config)

    def read(self, index: int, states: Tensor, inputs: Inputs) -> Tensor:
        """A whole layer, as the model itself runs it."""
        return self.layers[index](states, use_cache=True, **self._arguments(index, inputs))

    def attend(self, index: int, states: Tensor, inputs: Inputs) -> Tensor:
        """The output of a layer's attention over a group's input."""
        layer = self.layers[index]
        return layer.self_attn(hidden_states=layer.input_layernorm(states), **self._arguments(index, inputs))[0]

    def finish(self, index: int, states: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: `attended` is added to the states, which the MLP then reads as in the model itself."""
        layer = self.layers[index]
        read = states + attended
        return read + layer.mlp(layer.post_attention_layernorm(read))

    def _arguments(self, index: int, inputs: Inputs) -> dict[str, Any]:
        return {
            "attention_mask": inputs.masks[self.layer_types[index]],
            "position_ids": inputs.positions,
            "position_embeddings": inputs.rotary,
            CACHE: inputs.cache,
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


class Backend(ABC):
    """How the layers of a group attend."""

    def __init__(self, layered: LayeredModel, groups: Sequence[Sequence[int]]) -> None:
        self.layered = layered
        self.groups = groups

    @abstractmethod
    def attend(self, number: int, states: Tensor, inputs: Inputs) -> Sequence[Tensor]:
        """Attention outputs `[rows, tokens, hidden]` of a group's layers, all over the same `states`."""


class FusedBackend(Backend):
    """All layers of a group in one projection, one attention over all their heads and one projection back."""

    def __init__(self, layered: LayeredModel, groups: Sequence[Sequence[int]]) -> None:
        super().__init__(layered, groups)
        self._fused = {number: FusedAttention(layered, group) for number, group in enumerate(groups) if len(group) > 1}

    def attend(self, number: int, states: Tensor, inputs: Inputs) -> Sequence[Tensor]:
        """Attention outputs of a group's layers, as layer after layer gives them up to rounding."""
        return self._fused[number](states, inputs).unbind()


class FusedAttention:
    """The attention layers of one group as one.

    Norms of the same input differ in their gains alone, and those go into the projections: W (g * x) = (W diag g) x.
    """

    def __init__(self, layered: LayeredModel, group: Sequence[int]) -> None:
        self.attentions: list[Any] = []
        self._kinds: list[str] = []
        norms: list[Any] = []
        for index in group:
            self.attentions.append(layered.layers[index].self_attn)
            self._kinds.append(layered.layer_types[index])
            norms.append(layered.layers[index].input_layernorm)

        self._head_size = self.attentions[0].head_dim
        self._norm = _without_gain(norms[0])
        self._query_norm: Callable[[Tensor], Tensor] = nn.Identity()
        self._key_norm: Callable[[Tensor], Tensor] = nn.Identity()
        if hasattr(self.attentions[0], "q_norm"):  # as in Qwen3
            self._query_norm = _HeadNorm(list(map(attrgetter("q_norm"), self.attentions)))
            self._key_norm = _HeadNorm(list(map(attrgetter("k_norm"), self.attentions)))

        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for name in ("q_proj", "k_proj", "v_proj"):  # all queries, then all keys, then all values
            for attention, norm in zip(self.attentions, norms, strict=True):
                weight, bias = _matrix(getattr(attention, name))
                weights.append(weight * norm.weight.detach())
                biases.append(bias)

        self._weight = torch.cat(weights)
        self._bias = torch.cat(biases)

        config = layered.model.config
        num_key_heads = len(group) * config.num_key_value_heads
        self._num_heads = [len(group) * config.num_attention_heads, num_key_heads, num_key_heads]

        output_weights: list[Tensor] = []
        output_biases: list[Tensor] = []
        for attention in self.attentions:
            weight, bias = _matrix(attention.o_proj)
            output_weights.append(weight.T)
            output_biases.append(bias)

        self._output_weight = torch.stack(output_weights)  # [layers, heads * size, hidden]
        self._output_bias = torch.stack(output_biases)[:, None]

    def __call__(self, states: Tensor, inputs: Inputs) -> Tensor:
        """`[layers, rows, tokens, hidden]` of `states` `[rows, tokens, hidden]`; keys and values go to the cache."""
        projected = functional.linear(self._norm(states), self._weight, self._bias)
        queries, keys, values = projected.unflatten(-1, (-1, self._head_size)).split(self._num_heads, dim=-2)
        queries = self._query_norm(queries).transpose(1, 2)
        keys = self._key_norm(keys).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, *inputs.rotary)
        keys, values = inputs.cache.extend(keys, values.transpose(1, 2))

        first = self.attentions[0]
        mask = self._mask(inputs, queries.shape[1])
        attended, _ = grouped_sdpa(first, queries, keys, values, mask, scaling=first.scaling)
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
        self._norm = _without_gain(norms[0])
        self._gains = torch.stack([norm.weight.detach() for norm in norms])[:, None]  # [layers, 1, size]

    def __call__(self, heads: Tensor) -> Tensor:
        by_layer = self._norm(heads).unflatten(2, (len(self._gains), -1))
        return (self._gains * by_layer).flatten(2, 3)


def _matrix(linear: nn.Module) -> tuple[Tensor, Tensor]:
    """Weight and bias of a projection, zeros where it has none; quantised ones are refused."""
    if type(linear) is not nn.Linear:
        raise OptionError(
            '`backend="fused"` needs projections that are plain matrices, but the draft model has a '
            f"`{type(linear).__name__}`. Let each layer be a group of its own: `group_size=1`."
        )

    weight = linear.weight.detach()
    return weight, weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()


def _without_gain(norm: nn.Module) -> Any:
    """A copy of a norm that only norms."""
    unit: Any = copy.deepcopy(norm).requires_grad_(False)
    unit.weight.fill_(1.0)
    return unit


def weights_state(model: nn.Module) -> list[tuple[Any, ...]]:
    """A state that changes when a weight is replaced or written to.

    Writes in `inference_mode` and to `weight.data`, as by PEFT, are not counted; a value of each weight shows most.
    """
    weights = list(model.parameters())
    values = torch.stack([weight.detach().flatten()[weight.numel() // 2].float() for weight in weights]).tolist()
    found = []
    for weight, value in zip(weights, values, strict=True):
        version = 0 if weight.is_inference() else weight._version
        found.append((weight.data_ptr(), weight.dtype, version, value))

    return found


class DistributedBackend(Backend):
    """The layers of a group on several processes, each of which has the whole model; one exchange for each group.

    Of a group each process takes the same number of layers, in their order, the last ones maybe fewer or none. Only it
    has their drafted keys and values; what was read exactly is on every process.
    """

    def __init__(self, layered: LayeredModel, groups: Sequence[Sequence[int]], processes: Processes) -> None:
        super().__init__(layered, groups)
        self.processes = processes

    def attend(self, number: int, states: Tensor, inputs: Inputs) -> Sequence[Tensor]:
        """The attention of a group's layers, each computed by one process."""
        group = self.groups[number]
        num_own = -(-len(group) // self.processes.num)  # layers of a process at most
        own = group[self.processes.process_rank * num_own :][:num_own]
        part = states.new_zeros(num_own, *states.shape)
        for offset, index in enumerate(own):
            part[offset] = self.layered.attend(index, states, inputs)

        return self.processes.all_gather(part)[: len(group)].unbind()


# The drafter


class LayerParallelDrafter(WholeModelDrafter, GrowingDrafter):
    """A drafter that is a small language model of the target's family, several layers of which attend at once.

    What a step drafts is computed roughly, what became text exactly: the first pass of every step reads the new text
    layer after layer, as the model itself would, and nothing rough outlives the step.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM
    >>> from transformers_falcon_spec.drafters.autoregressive import make_draft_model
    >>> target = AutoModelForCausalLM.from_pretrained("models/reference-target")
    >>> drafter = LayerParallelDrafter.wrap(make_draft_model(target, num_hidden_layers=8), target, group_size=3)
    >>> drafter.config.layer_groups
    [[0], [1, 2, 3], [4, 5, 6], [7]]
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> drafted = target.generate(ids, assistant_model=drafter, max_new_tokens=8, do_sample=False)
    >>> drafted.equal(target.generate(ids, max_new_tokens=8, do_sample=False))
    True

    ```
    """

    config: LayerParallelConfig
    config_class = LayerParallelConfig
    wrapping_options = ("group_size", *WholeModelDrafter.wrapping_options)
    default_depth = 5  # the paper's
    _supports_sdpa = True

    def __init__(self, config: LayerParallelConfig, model: PreTrainedModel | None = None) -> None:
        super().__init__(config, model)
        self.layered = LayeredModel(self.model)
        self._fused: tuple[Any, FusedBackend] | None = None  # what it was made of, and it
        self._processes: Processes | None = None
        self.post_init()

    @classmethod
    def wrap(
        cls,
        model: PreTrainedModel,
        target: PreTrainedModel,
        *,
        group_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        **options: Any,
    ) -> Self:
        """A drafter for `target` that drafts with `model`, which stays where it is and becomes a part of the drafter.

        Args:
            model ([`~transformers.PreTrainedModel`]): A causal language model with the target's tokens.
            target ([`~transformers.PreTrainedModel`]): The target.
            group_size (`int`, *optional*): Most layers of a group, by default 2 in models of up to 16 layers and 4 in
                others; not beside `layer_groups`.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): That of `model`, to compare tokens.
                Without both of them only vocabularies of one size are taken for the same.
            target_tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): That of the target.
            options: Fields of [`LayerParallelConfig`].

        Raises:
            [`OptionError`]: the model is of a family that cannot be wrapped, or an option is out of range or unknown.
            [`DrafterMismatchError`]: the model has other tokens than the target.
        """
        check_family(model.config)
        sizes = (model.config.vocab_size, target.config.get_text_config(decoder=True).vocab_size)
        num_shared = shared_vocabulary(sizes, (tokenizer, target_tokenizer))
        if group_size is not None:
            if "layer_groups" in options:
                raise OptionError(
                    "`group_size` makes groups and `layer_groups` names them, so one must be left out, but they are "
                    f"{group_size} and {options['layer_groups']}."
                )

            options["layer_groups"] = build_groups(model.config.num_hidden_layers, group_size)

        config = LayerParallelConfig.for_models(model, target, num_shared, options)
        return cls(config, model).eval()

    def forward(self, input_ids: Tensor, is_exact: bool = False, **_: Any) -> Tensor:
        """Logits `[rows, tokens, draft_vocab_size]` in float32 of whole texts `[rows, tokens]` without padding.

        With `is_exact` the layers follow each other, as in the model alone.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        allowed = (positions[:, None] <= positions[..., None]).expand(len(input_ids), -1, -1)

        backend = self.backend()
        num_rows, num_tokens = input_ids.shape
        cache = SlotCache(len(backend.groups), num_rows, num_tokens, input_ids.device)
        cache.view.write_from(0)
        states = self.read(input_ids, allowed, positions, positions, cache, backend, is_exact)
        return self.logits(states)

    def read(
        self,
        token_ids: Tensor,
        allowed: Tensor,
        positions: Tensor,
        slot_positions: Tensor,
        cache: SlotCache,
        backend: Backend,
        is_exact: bool,
    ) -> Tensor:
        """States `[rows, tokens, hidden]` after the final norm; keys and values are added to `cache`.

        The cache has a layer for each group, which holds the heads of the group's layers one after the other.
        Tokens `[rows, tokens]` that the model lacks are read as id 0. Each sees the slots that `allowed`
        `[rows, tokens, slots]` names, less those beyond a window: of tokens and slots, these tokens' last, `positions`
        and `slot_positions` say where they stand in the text. If `is_exact`, every layer reads what the one before it
        gave.
        """
        layered = self.layered
        known = token_ids.where(token_ids < self.model.config.vocab_size, 0)
        states = self.model.get_input_embeddings()(known)

        masks = {}
        for kind in layered.kinds:
            seen = allowed
            if kind.sliding_window is not None:
                seen = allowed & (slot_positions[:, None] > positions[..., None] - kind.sliding_window)

            masks[kind.name] = additive(seen, states.dtype)

        rotary = layered.rotary(states, positions)
        for number, group in enumerate(backend.groups):
            inputs = Inputs(masks, positions, rotary, GroupSlice(cache, number, group))
            if is_exact or len(group) == 1:
                for index in group:
                    states = layered.read(index, states, inputs)
            else:
                for index, attended in zip(group, backend.attend(number, states, inputs), strict=True):
                    states = layered.finish(index, states, attended)

        return layered.final_norm(states)

    def logits(self, states: Tensor) -> Tensor:
        """Logits over the tokens that can be drafted, in float32."""
        return apply_head(self.model, states)[..., : self.config.draft_vocab_size]

    def backend(self) -> Backend:
        """The backend that computes groups; fused weights are made anew if the model's have changed."""
        self.config.check()
        groups = [list(group) for group in self.config.layer_groups]
        if self.config.backend == "distributed":
            self._processes = self._processes or ProcessGroup(self.config.timeout_seconds)  # the same for all calls
            return DistributedBackend(self.layered, groups, self._processes)

        made_of = (groups, weights_state(self.model))
        if self._fused is None or self._fused[0] != made_of:
            with torch.no_grad():
                self._fused = (made_of, FusedBackend(self.layered, groups))

        return self._fused[1]

    def join(self) -> Processes:
        """The processes on which it computes; this one alone unless `backend` is `"distributed"`.

        Raises:
            [`OptionError`]: `torch.distributed` does not run.
            [`DistributedError`]: drafters of the processes have other weights or options, or one did not come.
        """
        if self.config.backend != "distributed":
            return SINGLE_PROCESS

        backend = self.backend()
        assert isinstance(backend, DistributedBackend)  # as its name says
        options = {**named_options(self.config), **named_options(self.generation_config)}
        backend.processes.check_same({"drafter weights": weights_fingerprint(self), **options})
        return backend.processes

    @property
    def draft_token_ids(self) -> Tensor | None:
        """The ids that mean the same to both models; None where all of the target's do."""
        num_shared = self.config.draft_vocab_size
        return None if num_shared == self.config.vocab_size else torch.arange(num_shared, device=self.device)

    @property
    def draft_settings(self) -> dict[str, Any]:
        """Settings besides weights that decide its drafts."""
        settings = dict(super().draft_settings or {})
        for name in ("layer_groups", "backend", "draft_vocab_size"):
            settings[name] = getattr(self.config, name)

        return settings


class LayerParallelCandidateGenerator(PairGenerator):
    """Drafting with a [`LayerParallelDrafter`] during one call; all rows share the passes, each has its own tree.

    What other generators do with pairs it does with tokens: their features have no width.
    """

    drafter: LayerParallelDrafter
    head_rows: Any = None  # the draft model has a head of its own

    def __init__(
        self, drafter: LayerParallelDrafter, target: TargetView, max_length: int, rng: torch.Generator
    ) -> None:
        super().__init__(drafter, target, max_length, rng)
        self._backend = drafter.backend()
        context = context_of(drafter.model.config)
        self._context = max_length if context is None else context

    def commit(self, committed: Committed) -> None:
        """Keep the new tokens for the next proposal; at first the whole text."""
        num_new = committed.lengths if not self.has_text else committed.num_new
        nothing = torch.empty(len(num_new), max(num_new), 0, dtype=torch.float)
        super().commit(replace(committed, num_new=num_new, features=nothing))

    def commit_kept(self, kept: Kept) -> None:
        """Let the new tokens wait, which lie where those of all such steps lie."""
        nothing = torch.empty(*kept.token_ids.shape, 0, dtype=torch.float, device=kept.token_ids.device)
        super().commit_kept(replace(kept, features=nothing))

    def propose_tree(self, budget: DraftBudget) -> Draft | None:
        """A tree within the budget; None while no row has new tokens, or where the draft model's context ends."""
        if not self.has_text:
            return None

        depths = []
        for depth, num_read, num_new in zip(budget.depths, self.text.num_read, self.text.num_waiting, strict=True):
            room = self._context - num_read - num_new
            depths.append(max(min(depth, room), 0))

        return super().propose_tree(replace(budget, depths=tuple(depths))) if any(depths) else None

    def why_not_fixed(self, budget: DraftBudget) -> str | None:
        """Why drafts within such budgets cannot be made in fixed shapes, in words; None if they can."""
        if self.drafter.config.backend == "distributed":
            return "processes exchange what layers of the draft model give"

        return super().why_not_fixed(budget) or obstacle_in(self.drafter.model, "draft model")

    @property
    def settings(self) -> Any:
        """How layers are read, and with which fused weights: another object has others."""
        return self._backend

    @property
    def num_layers(self) -> int:
        """Layers of the cache: one for each group."""
        return len(self._backend.groups)

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:  # noqa: ARG002  they are empty
        """Read new tokens: the newest state of each row, `[rows, 1, 1, hidden]`."""
        positions = self.text.take_slots(token_ids.shape[1], num)
        mask = self.text.text_mask(positions, positions)
        return newest_of(self._read(token_ids, mask, positions, positions[:, :0], is_exact=True), num - 1)[:, None]

    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:  # noqa: ARG002  others read what parents gave
        """States `[rows, nodes, 1, hidden]` of drafted nodes of one depth, from their tokens and what they see."""
        positions = (self.text.cache.lengths + number - 1).expand(-1, token_ids.shape[1])
        before = positions[:, :0] if number == 1 else self._draft_positions
        self._draft_positions: Tensor = torch.cat([before, positions], dim=-1)  # where drafted tokens stand
        mask = self.text.draft_mask(seen, positions)
        return self._read(token_ids[..., 0], mask, positions, self._draft_positions, is_exact=False)[:, :, None]

    def _read(self, ids: Tensor, allowed: Tensor, positions: Tensor, drafted: Tensor, is_exact: bool) -> Tensor:
        """States `[rows, tokens, hidden]` of tokens, which see slots of the text and of `drafted` tokens."""
        slots = self.text.slot_positions(drafted)
        ids = ids.to(self.drafter.device)
        with tree_attention(self.drafter.model):
            return self.drafter.read(ids, allowed, positions, slots, self.text.cache, self._backend, is_exact)

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits of the draft model's own head, over the tokens that both models have."""
        return self.drafter.logits(features)


LayerParallelDrafter.generator_class = LayerParallelCandidateGenerator
