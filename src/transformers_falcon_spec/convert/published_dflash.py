"""The configs of published DFlash drafters, as fields of [`DFlashConfig`]; what their maths does not cover is refused.

Layers are those of Qwen3, whose defaults hold where a config is silent. An id of z-lab's `target_layer_ids` is a layer
whose output is read, one of speculators' `aux_hidden_state_layer_ids` a hidden state: one more.
"""

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel, Qwen3Config

from ..drafters.config_fields import own_fields
from ..drafters.dflash import LAYER_TYPES, SECOND_VERSION
from ..errors import CheckpointError, DrafterMismatchError
from ..generation.model_parts import named
from .llama_layers import flag, rope_parameters
from .source import Checkpoint

INNER = "dflash_config"
SLIDING = LAYER_TYPES[1]
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_LAYERS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types", "hidden_act"),
)
_SIZES = (*_LAYERS[:6], "max_position_embeddings")
# Fields that public software knows, and the only values with which it computes what drafters here compute.
_PLAIN: dict[str, Any] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "add_swa_attention_sink_bias": False,
    "is_neox_style": True,
    "logit_scale": 1,
    "partial_rotary_factor": 1,
    "sample_from_anchor": False,
    "shift_label": False,
    "projector_type": "dflash",
}
_PLAIN_INNER = {"attention_mode": ("gqa", "mha"), "projector_type": ("dflash",), "use_aux_hidden_state": (True,)}
_READ_INNER = ("block_size", "mask_token_id", "target_layer_ids", "causal", *SCALES, *SECOND_VERSION)


def published_fields(checkpoint: Checkpoint, target: PreTrainedModel | None) -> dict[str, Any]:
    """The fields of a drafter in the form of z-lab's repositories; newer ones keep more of them in `dflash_config`."""
    config, name = checkpoint.config, checkpoint.name
    inner = config.get(INNER)
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"The config of `{name}` must say in `{INNER}` which mask and which layers the drafter reads, but there "
            f"it has {inner!r}. Fetch the `config.json` of the drafter itself."
        )
    unknown = {
        field: value
        for field, value in inner.items()
        if field not in _READ_INNER and value not in (None, False, *_PLAIN_INNER.get(field, ()))
    }
    if unknown:
        raise CheckpointError(
            f"`{INNER}` must hold fields of {_READ_INNER} alone, but in `{name}` it says {unknown}, which may change "
            "what the drafter computes."
        )
    given = {**config, **{field: value for field, value in inner.items() if value is not None}}
    layers = _layers(config, config, name)
    stated = next((each for each in (config.get("is_causal"), inner.get("causal")) if each is not None), None)
    causal = [SLIDING] if stated is None else list(LAYER_TYPES) * flag({"is_causal": stated}, "is_causal", False, name)
    return {
        **_sizes(layers, name),
        **_masks(layers, causal, name),
        **_block(given, name),
        **_scales(given, name),
        **_second_version(checkpoint, given),
        "target_layer_ids": _layer_ids(given, "target_layer_ids", 0, name, target),
    }


def speculators_fields(
    checkpoint: Checkpoint, target: PreTrainedModel | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a drafter in the form of speculators, and the config of its layers with all defaults."""
    config, name = checkpoint.config, checkpoint.name
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise CheckpointError(f"`transformer_layer_config` must describe the layers, but in `{name}` it is {inner!r}.")
    layers = _layers(inner, {**config, "model_type": inner.get("model_type")}, name)
    causal = [] if flag(config, "sliding_window_non_causal", False, name) else [SLIDING]
    fields = {
        **_sizes(layers, name),
        **_masks(layers, causal, name),
        **_block(config, name),
        "target_layer_ids": _layer_ids(config, "aux_hidden_state_layer_ids", 1, name, target),
    }
    return fields, layers.to_dict()


def _layers(config: Mapping[str, Any], whole: Mapping[str, Any], name: str) -> Qwen3Config:
    """The config of the layers as the published class reads it; of the `whole` config nothing may ask for more."""
    rope = rope_parameters(dict(config), name)
    nested = {field: value for field, value in rope.items() if isinstance(value, dict)}
    if nested or rope.get("partial_rotary_factor", 1) != 1:
        raise CheckpointError(
            f"Rotary positions must turn whole heads, those of all layers alike, but the config of `{name}` says "
            f"{nested or rope}. Public software reads that in different ways."
        )
    given = {field: config[field] for field in own_fields(Qwen3Config) & config.keys()}
    try:
        layers = Qwen3Config(**{**given, "rope_parameters": rope})
    except (StrictDataclassError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"The config of `{name}` must be that of layers of Qwen3, but Transformers does not read it: "
            f"{' '.join(str(error).split())[:300]} Fetch the `config.json` of the drafter itself."
        ) from error
    plain = {**_PLAIN, "target_hidden_size": layers.hidden_size, "draft_vocab_size": layers.vocab_size}
    asked = {**config, **whole}
    wrong = {field: asked[field] for field in plain if asked.get(field) not in (None, plain[field])}
    if wrong:
        wanted = {field: plain[field] for field in wrong}
        raise CheckpointError(
            f"A DFlash drafter must have {wanted} to be converted, but the config of `{name}` says {wrong}: drafters "
            "here compute nothing else."
        )
    return layers


def _sizes(layers: Qwen3Config, name: str) -> dict[str, Any]:
    """The fields of the layers, whose numbers must be sizes."""
    fields = {field: getattr(layers, field) for field in _LAYERS}
    wrong = {field: fields[field] for field in _SIZES if type(fields[field]) is not int or fields[field] < 1}
    if wrong or fields["num_attention_heads"] % fields["num_key_value_heads"]:
        raise CheckpointError(
            f"The config of `{name}` must give {_SIZES} as positive whole numbers, and a multiple of the key heads as "
            f"heads, but it says {wrong or {field: fields[field] for field in _SIZES[3:5]}}."
        )
    return fields


def _masks(layers: Qwen3Config, causal: list[str], name: str) -> dict[str, Any]:
    """Who sees whom. A window of public software counts the token itself, one of Transformers' drafter does not."""
    types = layers.layer_types or []
    if not set(types) <= set(LAYER_TYPES):
        raise CheckpointError(f"`layer_types` must be of {LAYER_TYPES}, but in `{name}` they are {types}.")
    fields: dict[str, Any] = {"causal_layer_types": [each for each in causal if each in types] or None}
    if SLIDING not in types:
        return fields
    if type(layers.sliding_window) is not int or layers.sliding_window < 1:
        raise CheckpointError(
            f"Layers of the type {SLIDING!r} need `use_sliding_window` and a `sliding_window` of at least 1, but the "
            f"config of `{name}` says {layers.use_sliding_window} and {layers.sliding_window!r}."
        )
    return {**fields, "sliding_window": layers.sliding_window - 1}


def _block(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The size of a block and its mask."""
    fields = {field: given.get(field) for field in ("block_size", "mask_token_id")}
    if any(type(value) is not int for value in fields.values()):
        raise CheckpointError(
            f"The config of `{name}` must give `block_size` and `mask_token_id`, whole numbers, but it says {fields}. "
            "Fetch the `config.json` of the drafter itself."
        )
    return fields


def _scales(given: Mapping[str, Any], name: str) -> dict[str, float]:
    """What embeddings and logits are multiplied by, and what bounds the logits."""
    scales = {field: given[field] for field in SCALES if given.get(field) is not None}
    if scales.get(SCALES[2]) == 0:  # which says that nothing does
        del scales[SCALES[2]]
    wrong = {
        field: value
        for field, value in scales.items()
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf")
    }
    if wrong:
        raise CheckpointError(f"{SCALES} must be numbers above 0, but in `{name}` there are {wrong}.")
    return {field: float(value) for field, value in scales.items()}


def _second_version(checkpoint: Checkpoint, given: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of what DFlash2 adds."""
    sizes = {field: given[field] for field in SECOND_VERSION if given.get(field) is not None}
    is_second = "DFlash2DraftModel" in (given.get("architectures") or ())
    is_whole = len(sizes) == len(SECOND_VERSION) and all(type(size) is int and size > 0 for size in sizes.values())
    if is_second is not is_whole or (sizes and not is_whole):
        raise CheckpointError(
            f"A DFlash2 drafter (`architectures`) must give {SECOND_VERSION} as positive whole numbers, and a DFlash "
            f"drafter none of them, but `{checkpoint.name}` is {given.get('architectures')} with {sizes}."
        )
    return sizes


def _layer_ids(
    given: Mapping[str, Any], field: str, offset: int, name: str, target: PreTrainedModel | None
) -> list[int]:
    """The layers of the target whose outputs are read; its last one is not, for a norm stands behind it."""
    ids, stated = given.get(field), given.get("num_target_layers")
    if not isinstance(ids, list) or not ids or any(type(each) is not int or each < offset for each in ids):
        raise CheckpointError(
            f"`{field}` must list what is read of the target's layers, whole numbers of at least {offset}, but in "
            f"`{name}` it is {ids!r}."
        )
    layers, found = [each - offset for each in ids], stated
    if target is not None:
        _check_embeddings(target)
        found = target.config.get_text_config(decoder=True).num_hidden_layers
        if stated not in (None, found):
            raise DrafterMismatchError(
                f"`{name}` was trained for a target of {stated} layers (`num_target_layers`), but {named(target)} has "
                f"{found}. Take the target that it was trained for."
            )
    if type(found) is int and max(layers) > found - 2:
        raise DrafterMismatchError(
            f"`{name}` reads the outputs of the target's layers {layers}, so they must lie in 0..{found - 2}, but one "
            "is above that. Take the target that it was trained for."
        )
    return layers


def _check_embeddings(target: PreTrainedModel) -> None:
    """Refuse a target whose embeddings are scaled where they are read."""
    scale = getattr(target.get_input_embeddings(), "scalar_embed_scale", 1)
    if scale != 1:
        raise DrafterMismatchError(
            "Published DFlash drafters need a target that reads its embeddings as they are stored, but "
            f"{named(target)} multiplies them by {scale:g} first, and public software does not agree whether its "
            "drafters read them so. Train one: `falcon-spec train --method dflash`."
        )
