"""Small language models that draft for a target: stock models of its own family and vocabulary, with fewer layers.

They are no drafters of this package: they serve stock assisted generation, and whatever else takes a small language
model.
"""

import copy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from ..core.options import check_known
from ..errors import DrafterMismatchError, OptionError
from ..generation.model_parts import check_can_be_assisted, decoder_of, device_of

DEFAULT_LAYERS = 2
_OF_EACH_LAYER = (
    *("layer_types", "mlp_layer_types", "no_rope_layers"),  # kinds
    *("intermediate_size", "activation_sparsity_pattern"),  # Gemma 3n
)


def make_draft_model(target: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """A small model like `target`, with 2 layers by default, in float32, in eval mode and on the target's device.

    Where it differs from the target in depth alone, it starts out with the target's embeddings, norms and head, and
    with layers spread evenly over the target's, the first and the last among them (the start of DistilBERT, arXiv
    1910.01108, section 3). With any other option its weights are fresh; `options` are fields of the target's own
    configuration.

    Raises:
        [`OptionError`]: an option that is no field, or a number of layers that the target does not have.
        [`TargetError`]: stock assisted generation does not serve the target.
        [`DrafterMismatchError`]: the chosen layers of the target make no model of their own.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    >>> target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes))
    >>> make_draft_model(target, num_hidden_layers=3).config.num_hidden_layers
    3

    ```
    """
    check_can_be_assisted(target)
    theirs = target.config.get_text_config(decoder=True)
    check_known(type(theirs).__name__, options, (name for name in options if hasattr(theirs, name)))

    options = {"num_hidden_layers": DEFAULT_LAYERS, **options}
    num_layers, most = options["num_hidden_layers"], theirs.num_hidden_layers
    if not 1 <= num_layers <= most:
        raise OptionError(f"`num_hidden_layers` must lie in 1..{most}, the target's number, but it is {num_layers}.")

    layers = [round(number * (most - 1) / max(num_layers - 1, 1)) for number in range(num_layers)]  # spread evenly

    try:
        model = _assembled(target, layers, options)
    except (StrictDataclassError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        way_out = "Choose another `num_hidden_layers`"
        if getattr(target, "is_quantized", False):
            way_out = "Its weights are quantised: make the draft model of the target as it is without"

        raise DrafterMismatchError(
            f"Layers {layers} of the target must make a `{type(target).__name__}` of their own, "
            f"but they do not: {reason}. {way_out}, or name more fields of "
            f"`{type(theirs).__name__}`: a draft model that differs in more than its depth starts afresh."
        ) from error

    return model.to(device=device_of(target))  # type: ignore[call-arg]  # a decorator hides the signature


def _assembled(target: PreTrainedModel, layers: list[int], options: dict[str, Any]) -> PreTrainedModel:
    """The draft model, filled where it differs from the target in depth alone."""
    config = _config(target.config.get_text_config(decoder=True), layers, options)
    DynamicCache(config=config).get_seq_length()  # assisted generation asks for it; without attention there is none
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long))  # layers that need one another say so at the latest when they run

    model.generation_config = copy.deepcopy(target.generation_config)
    if set(options) == {"num_hidden_layers"}:
        _copy_weights(target, model, layers)

    return model


def _config(theirs: PreTrainedConfig, layers: list[int], options: dict[str, Any]) -> PreTrainedConfig:
    """The target's configuration with other fields; lists by layer keep the chosen layers."""
    given, most = theirs.to_dict(), theirs.num_hidden_layers
    fields = {**given, **options}
    fields.pop("quantization_config", None)

    for name in set(_OF_EACH_LAYER) - set(options):
        if isinstance(given.get(name), list | tuple) and len(given[name]) == most:
            fields[name] = [given[name][layer] for layer in layers]

    if "per_layer_config" in given:  # of those that differ, by their numbers (Gemma 4)
        differing = given["per_layer_config"]
        chosen = enumerate(map(str, layers))
        fields["per_layer_config"] = {number: differing[layer] for number, layer in chosen if layer in differing}

    if given.get("num_kv_shared_layers") and "num_kv_shared_layers" not in options:  # the last ones
        fields["num_kv_shared_layers"] = sum(layer >= most - given["num_kv_shared_layers"] for layer in layers)

    return type(theirs).from_dict(fields)


def _copy_weights(target: PreTrainedModel, model: PreTrainedModel, layers: list[int]) -> None:
    """Fill a model that differs from `target` in depth alone."""
    most = target.config.get_text_config(decoder=True).num_hidden_layers
    for theirs, ours in zip(decoder_of(target).children(), decoder_of(model).children(), strict=True):
        if isinstance(ours, nn.ModuleList) and isinstance(theirs, nn.ModuleList) and len(theirs) == most:
            for layer, source in zip(ours, layers, strict=True):
                layer.load_state_dict(_own_weights(theirs[source]))
        else:
            shapes = {key: value.shape for key, value in ours.state_dict().items()}
            weights = _own_weights(theirs).items()
            ours.load_state_dict({key: _narrowed(value, shapes.get(key), most, layers) for key, value in weights})

    model.get_output_embeddings().load_state_dict(_own_weights(target.get_output_embeddings()))


def _own_weights(part: nn.Module) -> dict[str, Tensor]:
    """The weights of a part of the target by their usual names, not quantised. LoRA stays out, as training adds it."""
    weights = {}
    for key, value in part.state_dict().items():
        if "lora_" not in key:
            plain = value.dequantize() if hasattr(value, "__tensor_flatten__") else value
            weights[key.replace("base_layer.", "")] = plain

    return weights


def _narrowed(weight: Tensor, shape: torch.Size | None, num_layers: int, layers: list[int]) -> Tensor:
    """The chosen layers' parts of a weight that holds a part for each layer, such as Gemma 3n's inputs per layer."""
    if shape is None or weight.shape == shape:
        return weight

    dim = next(dim for dim, (size, wanted) in enumerate(zip(weight.shape, shape, strict=True)) if size != wanted)
    return weight.unflatten(dim, (num_layers, -1))[(slice(None),) * dim + (layers,)].flatten(dim, dim + 1)
