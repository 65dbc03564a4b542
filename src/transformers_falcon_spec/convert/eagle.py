"""Converting Eagle checkpoints: Eagle-1 and 2 (`fc.weight`, `layers.0.*`), and Eagle-3 as published or of speculators.

Sources: SafeAILab/EAGLE, `eagle/model/cnets1.py` and `cnets.py`; vllm-project/speculators, `models/eagle3`. Weights
of HASS have the form of Eagle-1. Eagle-3.1 adds a norm for each feature and feeds back the normed output.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from ..drafters.eagle import MIN_LAYERS_AS_PUBLISHED, EagleConfig, EagleDrafter, eagle3_feature_layers
from ..errors import CheckpointError
from .conversion import (
    COMPARED,
    EMBEDDINGS,
    TRAINING_COPIES,
    Conversion,
    check_shape,
    has_own_embeddings,
    rename_weights,
)
from .llama_layers import flag, layer_fields, layer_names
from .source import Checkpoint
from .target_facts import SPECIAL_IDS, check_widths, fields_of, needs_target

LAYER, MIDLAYER = "layers.0", "midlayer"  # what the one layer is called: by Eagle-1 and speculators, and by Eagle-3
VOCABULARY = ("d2t", "t2d")
WHOLE_VOCABULARY = "which leads every token to itself"
NUM_LAYERS_READ = 3
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
INNER_CONFIG = "eagle_config"  # there SGLang and SpecForge count layers from 0 and read their outputs: one less
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of version 3


def convert_eagle(checkpoint: Checkpoint, target: PreTrainedModel | None) -> Conversion:
    """Convert an Eagle-1 or Eagle-2 checkpoint to version 1; both have weights of one form."""
    fields = _layer_fields(checkpoint.config, checkpoint.name)
    check_widths(fields["hidden_size"], target)
    config = EagleConfig(
        **fields,
        **fields_of(checkpoint.config, target, checkpoint.config.get("_name_or_path")),
        version=1,
        qkv_bias=flag(checkpoint.config, "qkv_bias", False, checkpoint.name),
        fc_bias=flag(checkpoint.config, "bias", True, checkpoint.name),
        own_embeddings=has_own_embeddings(checkpoint, target),
    )
    weights, dropped = rename_weights(checkpoint, weight_names(config, LAYER), {EMBEDDINGS: COMPARED})
    return Conversion(EagleDrafter, config, weights, dropped)


def convert_eagle3(checkpoint: Checkpoint, target: PreTrainedModel | None) -> Conversion:
    """Convert a checkpoint in the form that was published with Eagle-3."""
    config = checkpoint.config
    fields = _layer_fields(config, checkpoint.name)
    options = {
        **fields_of(config, target, config.get("_name_or_path")),
        "head_dim": config.get("head_dim") or fields["head_dim"],
        "attention_bias": flag(config, "attention_bias", False, checkpoint.name),
    }
    layer_ids, offset = config.get(LAYER_IDS), 0
    inner = config.get(INNER_CONFIG)
    if not layer_ids and isinstance(inner, dict):
        layer_ids, offset = inner.get(LAYER_IDS), 1
    options["feature_layers"] = _feature_layers(layer_ids, offset, target, checkpoint.name)
    return _convert(checkpoint, target, {**fields, **options}, MIDLAYER)


def convert_eagle3_speculators(checkpoint: Checkpoint, target: PreTrainedModel | None) -> Conversion:
    """Convert a checkpoint in the form of speculators, where the layer has a config of its own."""
    config, name = checkpoint.config, checkpoint.name
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict) or inner.get("model_type", "llama") != "llama":
        raise CheckpointError(
            f"`transformer_layer_config` must describe a layer of `model_type` 'llama', but in `{name}` it is "
            f"{inner.get('model_type') if isinstance(inner, dict) else inner!r}."
        )
    derived = dict.fromkeys(("rope_parameters", "head_dim", "num_key_value_heads"))  # they follow from other fields
    layer_config = {**LlamaConfig().to_dict(), **derived, **inner}
    fields = _layer_fields(layer_config, name)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}  # the target
    ids = {field: inner.get(field) for field in SPECIAL_IDS}
    options = {
        **fields_of({"vocab_size": layer_config["vocab_size"], **ids}, target, verifier.get("name_or_path")),
        "head_dim": layer_config["head_dim"] or fields["head_dim"],
        "attention_bias": flag(layer_config, "attention_bias", False, name),
        "feature_layers": _feature_layers(config.get(LAYER_IDS), 0, target, name),
    }
    return _convert(checkpoint, target, {**fields, **options}, LAYER)


def _layer_fields(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Read the fields of the decoder layer, and check that there is one."""
    fields = layer_fields(config, name)
    if (num_layers := fields["num_hidden_layers"]) != 1:
        raise CheckpointError(
            f"An Eagle drafter must have one decoder layer to be converted, but `{name}` has {num_layers}."
        )
    return fields


def _convert(
    checkpoint: Checkpoint, target: PreTrainedModel | None, options: dict[str, Any], layer: str
) -> Conversion:
    hidden = options["hidden_size"]
    if (checkpoint.config.get("target_hidden_size") or hidden) != hidden:
        raise CheckpointError(
            f"An Eagle drafter must be as wide as its target, whose embeddings it reads, but `{checkpoint.name}` has "
            f"{hidden} and `target_hidden_size` {checkpoint.config['target_hidden_size']}: it has embeddings of its "
            "own width, which are not converted."
        )
    check_widths(hidden, target, reads_head_input=False)
    flags: dict[str, Any] = {name: flag(checkpoint.config, name, False, checkpoint.name) for name in FLAGS}
    is_trained = flag(checkpoint.config, "embed_requires_grad", False, checkpoint.name)
    config = EagleConfig(
        **options,
        **flags,
        version=3,
        draft_vocab_size=checkpoint.config.get("draft_vocab_size"),
        own_embeddings=has_own_embeddings(checkpoint, target) or is_trained,
    )
    droppable = {EMBEDDINGS: COMPARED, **TRAINING_COPIES, **dict.fromkeys(VOCABULARY, WHOLE_VOCABULARY)}
    weights, dropped = rename_weights(checkpoint, weight_names(config, layer), droppable)
    if config.has_own_vocabulary:
        weights |= _vocabulary(checkpoint, config)
        dropped = {name: why for name, why in dropped.items() if name not in VOCABULARY}
    else:
        _check_whole_vocabulary(checkpoint)
    return Conversion(EagleDrafter, config, weights, dropped)


def weight_names(config: EagleConfig, layer: str) -> dict[str, str]:
    """Map the names of a foreign drafter's weights, whose layer is called `layer`, to those of this package.

    The maps between vocabularies, which are called `VOCABULARY` on both sides, are not among them.
    """
    names = {EMBEDDINGS: EMBEDDINGS} if config.own_embeddings else {}
    if config.version == 1:
        names |= {"fc.weight": "fc.weight"} | ({"fc.bias": "fc.bias"} if config.fc_bias else {})
        return names | layer_names(layer, "layer", ("post_attention_layernorm",), config.qkv_bias)
    own = ["fc.weight", "norm.weight", "lm_head.weight"]
    own += ["input_norm.weight"] if config.norm_before_fc else []
    own += [f"fc_norm.{index}.weight" for index in range(NUM_LAYERS_READ) if config.fc_norm]
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    names |= {name: name for name in own} | layer_names(layer, "layer", norms, config.attention_bias)
    if config.attention_bias:
        names[f"{layer}.self_attn.o_proj.bias"] = "layer.self_attn.o_proj.bias"
    return names


def _feature_layers(layer_ids: Any, offset: int, target: PreTrainedModel | None, name: str) -> tuple[int, ...]:
    """Return the hidden states that the drafter reads: those in its config, else those of the published rule.

    The ids in the config are `offset` less than the hidden states. Sources: vLLM, `gpu_model_runner.py`, reads the
    input of the layer that the config itself names, so hidden state i for id i; SGLang, `models/llama.py`, the output
    of the one that `eagle_config` names, so hidden state i + 1, as SpecForge trains.
    """
    num_layers = None if target is None else target.config.get_text_config(decoder=True).num_hidden_layers
    if layer_ids is None:
        if num_layers is None:
            raise needs_target("how many layers the target has, for from them follows which ones the drafter reads")
        if num_layers < MIN_LAYERS_AS_PUBLISHED:
            raise CheckpointError(
                f"`{name}` must say which layers it reads (`{LAYER_IDS}`), for the published rule needs a target of "
                f"at least {MIN_LAYERS_AS_PUBLISHED} layers, and the target has {num_layers}."
            )
        return eagle3_feature_layers(num_layers)
    is_list = isinstance(layer_ids, list) and all(type(each) is int and each >= 0 for each in layer_ids)
    if not is_list or len(layer_ids) != NUM_LAYERS_READ or len(set(layer_ids)) != NUM_LAYERS_READ:
        raise CheckpointError(
            f"`{LAYER_IDS}` must list {NUM_LAYERS_READ} different hidden states, counted from 0, but in `{name}` it "
            f"is {layer_ids!r}."
        )
    if num_layers is not None and max(layer_ids) + offset >= num_layers:
        raise CheckpointError(
            f"`{LAYER_IDS}` must lie in 0..{num_layers - 1 - offset}, the {'outputs' if offset else 'inputs'} of the "
            f"target's layers{' but the last' * offset}, but in `{name}` it is {layer_ids}."
        )
    return tuple(each + offset for each in layer_ids)


def _check_whole_vocabulary(checkpoint: Checkpoint) -> None:
    """Refuse maps of a drafter with all tokens that change one into another: its head would be read wrongly."""
    offsets, marks = (checkpoint.tensors.get(name, torch.zeros(0, dtype=torch.float32)) for name in VOCABULARY)
    is_wrong = {"d2t": bool(offsets.any()), "t2d": not marks.bool().all()}
    wrong = [name for name in VOCABULARY if is_wrong[name]]
    if wrong:
        raise CheckpointError(
            "Maps between vocabularies must lead every token to itself where the drafter has as many as the target, "
            f"but in `{checkpoint.name}` {wrong} do not. Check `draft_vocab_size` of its config."
        )


def _vocabulary(checkpoint: Checkpoint, config: EagleConfig) -> dict[str, Tensor]:
    """Check and return the draft vocabulary: `d2t` holds offsets from draft to target ids, `t2d` marks target ids."""
    if "d2t" not in checkpoint.tensors:
        raise CheckpointError(
            f"`{checkpoint.name}` must hold `d2t`, which maps its {config.num_draftable_tokens} tokens to the "
            f"target's {config.vocab_size}, but it does not. Fetch the whole checkpoint."
        )
    check_shape(checkpoint, "d2t", (config.num_draftable_tokens,))
    check_shape(checkpoint, "t2d", (config.vocab_size,))
    offsets = checkpoint.tensors["d2t"]
    ids = offsets + torch.arange(len(offsets))
    is_inside = not offsets.is_floating_point() and bool(((ids >= 0) & (ids < config.vocab_size)).all())
    can_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
    if is_inside:
        can_draft[ids] = True
    if can_draft.sum() != len(ids) or not can_draft.equal(checkpoint.tensors.get("t2d", can_draft).bool()):
        raise CheckpointError(
            f"`d2t` must lead to different tokens of the target's {config.vocab_size}, those that `t2d` marks, but in "
            f"`{checkpoint.name}` it does not. An offset is added to the drafter's id: target = draft + d2t[draft]."
        )
    return {"d2t": offsets.long(), "t2d": can_draft}
