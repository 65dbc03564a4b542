"""Small language models that draft for a target: stock models of its own family and vocabulary, with fewer layers.

They are no drafters of this package: they serve stock assisted generation, and whatever else takes a small language model.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..errors import OptionError
from ..generation.parts import decoder_of

DEFAULT_LAYERS = 2


def make_draft_model(target: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """A model like `target` with `num_hidden_layers` layers, 2 unless told otherwise, in float32 on the target's device.

    Where it differs from the target in depth alone, it starts out with the target's embeddings, norms and head, and with layers
    spread evenly over the target's, the first and the last among them (the start of DistilBERT, arXiv 1910.01108, section 3).
    With any other option its weights are fresh.

    Args:
        target ([`~transformers.PreTrainedModel`]): The model to draft for.
        options: Fields of the target's own configuration.

    Raises:
        [`OptionError`]: an option that is no field, or a number of layers that the target does not have.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    >>> target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes))
    >>> make_draft_model(target, num_hidden_layers=3).config.num_hidden_layers
    3

    ```
    """
    theirs = target.config.get_text_config(decoder=True)
    unknown = sorted(name for name in options if not hasattr(theirs, name))
    if unknown:
        raise OptionError(f"`{type(theirs).__name__}` has no option {', '.join(f'`{name}`' for name in unknown)}.")
    options = {"num_hidden_layers": DEFAULT_LAYERS, **options}
    num_layers, most = options["num_hidden_layers"], theirs.num_hidden_layers
    if not 1 <= num_layers <= most:
        raise OptionError(f"`num_hidden_layers` must lie in 1..{most}, the target's number, but it is {num_layers}.")
    layers = _spread(most, num_layers)
    model = AutoModelForCausalLM.from_config(_config(theirs, layers, options), dtype=torch.float32)
    model.generation_config = copy.deepcopy(target.generation_config)
    if set(options) == {"num_hidden_layers"}:
        _copy_weights(target, model, layers)
    return model.to(target.device)


def _spread(num_layers: int, num_chosen: int) -> list[int]:
    """Indices from the first to the last of `num_layers`, evenly spread; the first one where only one is chosen."""
    return [round(number * (num_layers - 1) / max(num_chosen - 1, 1)) for number in range(num_chosen)]


def _config(theirs: PreTrainedConfig, layers: list[int], options: dict[str, Any]) -> PreTrainedConfig:
    """The target's configuration with other fields; kinds of layers, where they are listed, are those of the chosen ones."""
    fields = {**theirs.to_dict(), **options}
    fields.pop("quantization_config", None)
    if fields.get("layer_types") is not None and "layer_types" not in options:
        fields["layer_types"] = [fields["layer_types"][layer] for layer in layers]
    return type(theirs).from_dict(fields)


def _copy_weights(target: PreTrainedModel, model: PreTrainedModel, layers: list[int]) -> None:
    """Fill a model that differs from `target` in depth alone."""
    for (name, theirs), ours in zip(decoder_of(target).named_children(), decoder_of(model).children(), strict=True):
        if isinstance(theirs, nn.ModuleList) and len(theirs) == target.config.get_text_config().num_hidden_layers:
            for layer, source in zip(getattr(decoder_of(model), name), layers, strict=True):
                layer.load_state_dict(theirs[source].state_dict())
        else:
            ours.load_state_dict(theirs.state_dict())
    model.get_output_embeddings().load_state_dict(target.get_output_embeddings().state_dict())
