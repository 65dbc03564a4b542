"""Parts of a model and facts about them: decoder, embeddings, device, and the kinds of attention."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicIndexedLayer, LinearAttentionCacheLayerMixin

from ..errors import GenerationError, TargetError

Fact = TypeVar("Fact")


def once_a_model(find: Callable[[PreTrainedModel], Fact]) -> Callable[[PreTrainedModel], Fact]:
    """Let a function of a model look at each model once; what it found is kept as long as the model lives."""
    known: WeakKeyDictionary[PreTrainedModel, Fact] = WeakKeyDictionary()

    @wraps(find)
    def known_fact(model: PreTrainedModel) -> Fact:
        if model not in known:
            known[model] = find(model)
        return known[model]

    return known_fact


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part that makes the last hidden state of a text: it holds the embeddings, and not the head that reads it."""
    return model.get_submodule(decoder_path(model))


@once_a_model
def decoder_path(model: PreTrainedModel) -> str:
    """The names that lead from a model to its decoder, with dots between them."""
    return path_of(model, _find_decoder(model))


def path_of(model: nn.Module, part: nn.Module | None) -> str:
    """The names that lead from a model to a part of it, with dots between them; none for the model itself."""
    return next((name for name, each in model.named_modules() if each is part), "")


def _find_decoder(model: PreTrainedModel) -> nn.Module:
    """What the model calls its decoder, or where that is the model, its head or holds it, the part that is none."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    named_so = model.get_decoder()
    if named_so is not model and holds(named_so, embeddings) and not holds(named_so, head):
        return named_so

    part: nn.Module = model

    while True:
        inner = next((child for child in part.children() if holds(child, embeddings)), None)
        if inner is None or inner is embeddings:
            return named_so
        if not holds(inner, head):
            return inner

        part = inner


def holds(part: nn.Module, inner: nn.Module | None) -> bool:
    """Whether a module is, or holds, another one."""
    return any(each is inner for each in part.modules())


def changed_copy(part: nn.Module, **changes: Any) -> Any:
    """A copy of a part that shares all with it but the changes, also what its constructor made."""
    made = object.__new__(type(part))
    vars(made).update(vars(part), **changes)
    return made


def device_of(model: PreTrainedModel) -> torch.device:
    """The device of a model's inputs, also where its weights are offloaded and only come there to be read."""
    if model.device.type != "meta":
        return model.device

    for part in model.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):  # several in one
            device = getattr(each, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return model.device


def autocast_type(model: PreTrainedModel) -> torch.dtype | None:
    """The type in which autocast lets a model compute; None where it is off."""
    device_type = model.device.type
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def is_spread(model: PreTrainedModel) -> bool:
    """Whether the parts of a model are spread over several devices or disk, and move their inputs themselves."""
    return len(set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))) > 1


def cuda_devices(model: PreTrainedModel) -> list[torch.device]:
    """The CUDA devices of a model's weights."""
    return sorted({weight.device for weight in model.parameters() if weight.device.type == "cuda"}, key=str)


def named(model: PreTrainedModel) -> str:
    """The name of a model in messages: its name or path, or else its class."""
    return f"`{model.config._name_or_path or type(model).__name__}`"


def check_takes_back(model: PreTrainedModel) -> None:
    """Refuse a target that cannot take back rejected drafts, as its configuration says: [`GenerationError`]."""
    if model.config.is_encoder_decoder:
        raise GenerationError(
            f"`{type(model).__name__}` has an encoder, so it cannot take back rejected drafts. Generate without "
            "`assistant_model`."
        )

    if not model._is_stateful:
        return

    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        raise GenerationError(
            f"`{type(model).__name__}` keeps a state outside of the recurrent layers of Transformers' `DynamicCache`, "
            "so that rejected drafts cannot be taken back. Generate without `assistant_model`."
        )

    if "cache_params" in inspect.signature(type(model).forward).parameters:
        raise GenerationError(
            f"Before Transformers 5.24, `{type(model).__name__}` takes its cache as `cache_params`, which cannot be "
            "drafted for. Update Transformers, or generate without `assistant_model`."
        )

    takes_groups = hasattr(model.config.get_text_config(decoder=True), "indexer_compress_ratio")
    if takes_groups and not hasattr(DynamicIndexedLayer(), "indexer_position_ids"):
        raise GenerationError(
            f"Before Transformers 5.24, the index of `{type(model).__name__}` keeps no places of tokens, so that "
            "rejected drafts cannot be taken back. Update Transformers, or generate without `assistant_model`."
        )


def check_has_weights(model: PreTrainedModel) -> None:
    """Refuse a target whose weights are nowhere, or come to no device to be read: [`GenerationError`]."""
    if device_of(model).type == "meta":
        raise GenerationError(
            f"{named(model)} must have its weights to write text, but they are on the `meta` device, which holds "
            "none. Load them: `from_pretrained`."
        )


def check_can_be_assisted(model: PreTrainedModel) -> None:
    """Raise an error for a target with a recurrent state, which stock assisted generation does not take."""
    if model._is_stateful:
        raise TargetError(
            "Stock assisted generation needs a target whose cache can be cut back to the tokens that were kept, but a "
            f"`{type(model).__name__}` keeps a state of all that it read. Choose a target whose layers are all "
            "attention."
        )


def embedding_width(model: PreTrainedModel) -> int:
    """Width of a token's embedding."""
    return _table_shape(model)[-1]


def num_embeddings(model: PreTrainedModel) -> int:
    """The number of tokens that have an embedding."""
    return _table_shape(model)[0]


def num_writable(model: PreTrainedModel) -> int:
    """The number of tokens that a model can write, the first ones; its head may leave out others (Apertus 1.5)."""
    config: Any = model.config.get_text_config(decoder=True)
    matrix = model.get_output_embeddings()
    is_told = getattr(matrix, "in_features", None) == config.hidden_size  # PEFT's copy of a tied one turns both round
    return int(matrix.out_features if is_told else config.vocab_size)


def _table_shape(model: PreTrainedModel) -> torch.Size:
    weight: Any = getattr(model.get_input_embeddings(), "weight")  # noqa: B009  of an `nn.Embedding`, or of a wrapper
    return (weight if isinstance(weight, Tensor) else weight()).shape  # a packed one is unpacked by a function


def reading_all_tokens(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a prefill in which every layer reads the whole prompt, also those that share keys (Gemma 4)."""
    is_shared = getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    if not is_shared or model_kwargs.get("logits_to_keep") != 1:
        return model_kwargs
    # given by number, tokens whose logits are not wanted would be left out; given by index they are not
    return {**model_kwargs, "logits_to_keep": torch.tensor([-1], device=device_of(model))}


_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # layer types that mean the same everywhere
_BESIDE_STATES = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # that has these recurrent states


def reads_as_usual(config: PreTrainedConfig) -> bool:
    """Whether all layers of a model are known by their names to attend, to all of the text or to what is near."""
    names = getattr(config, "layer_types", None)
    return names is not None and _ATTENTION.issuperset(names)


def in_layers(config: PreTrainedConfig, name: str) -> list[Any]:
    """A field of a config, or None where it has none: in each layer if layers differ in it (Gemma 4), else once."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return [getattr(layer, name, None) for layer in layers]


@dataclass(frozen=True)
class LayerKind:
    """One kind of attention and what it may see."""

    name: str
    layer_index: int  # the first layer of this kind; layers that share another's cache come later
    sliding_window: int | None = None
    chunk_size: int | None = None


def layer_kinds(config: PreTrainedConfig) -> list[LayerKind]:
    """The kinds of attention in a model, as Transformers' `create_masks_for_generate` distinguishes them."""
    names = getattr(config, "layer_types", None)
    layers = DynamicCache(config=config).layers
    if names is None:
        first = next((index for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)), 0)
        window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
        return [LayerKind("full_attention", first, window, None if window else chunk)]

    kinds = []
    for name in dict.fromkeys(names):
        index = list(names).index(name)
        layer = layers[index] if index < len(layers) else None
        if layer is None or isinstance(layer, CacheLayerMixin):
            reach = getattr(layer, "sliding_window", None)  # whatever layers with a window are called
            limits = (None, reach) if name == "chunked_attention" else (reach, None)
            kinds.append(LayerKind(name, index, *limits))

    return kinds


def masks_by_kind(config: PreTrainedConfig, masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor | None] | None:
    """The masks in the form that the model takes: all if its forward picks one by `layer_types`, or the only one.

    The only one of a target with recurrent layers goes alone, too: those then get none, whatever they are called. None
    where all layers are recurrent.
    """
    if not masks:
        return None
    names = getattr(config, "layer_types", None)
    if names is None or (len(masks) == 1 and not reads_as_usual(config)):
        return next(iter(masks.values()))
    # layers that both attend and keep a state are also asked for by their parts, of which a state has no mask
    by_part = {part: masks[name] for name, part in _BESIDE_STATES.items() if name in masks}
    return {**dict.fromkeys((*names, "linear_attention")), **by_part, **masks}


def sliding_windows(config: PreTrainedConfig) -> list[int | None]:
    """The number of slots in the cache of each attention layer, a window or a chunk; None where it holds all."""
    by_name = {kind.name: kind.sliding_window or kind.chunk_size for kind in layer_kinds(config)}
    names = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = zip(names, DynamicCache(config=config).layers, strict=False)  # of which some are shared
    attending = {name for name, layer in layers if isinstance(layer, CacheLayerMixin)}
    return [by_name[name] for name in names if name in attending]
