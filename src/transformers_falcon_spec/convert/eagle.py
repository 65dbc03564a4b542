"""Converting Eagle-1 and Eagle-2 checkpoints (`fc.weight` and one layer, `layers.0`) to version 1 of [`EagleDrafter`].

Source: SafeAILab/EAGLE, `eagle/model/cnets1.py`. HASS trains weights of the same form.
"""

from typing import Any

from ..drafters.eagle import EagleConfig, EagleDrafter
from ..errors import CheckpointError
from .building import Conversion, check_shape, rename_weights
from .llama_layers import flag, layer_fields, layer_names
from .source import Checkpoint
from .target_facts import TargetFacts, check_widths, fields_of

EMBEDDINGS = "embed_tokens.weight"  # a frozen copy of the target's


def convert_eagle(checkpoint: Checkpoint, target: TargetFacts | None) -> Conversion:
    """Convert an Eagle-1 or Eagle-2 checkpoint; both have weights of one form."""
    fields = one_layer(layer_fields(checkpoint.config, checkpoint.name), checkpoint.name)
    hidden = fields["hidden_size"]
    check_widths(hidden, target)
    config = EagleConfig(
        **fields,
        **fields_of(checkpoint.config, target, checkpoint.config.get("_name_or_path")),
        version=1,
        qkv_bias=flag(checkpoint.config, "qkv_bias", False, checkpoint.name),
        fc_bias=flag(checkpoint.config, "bias", True, checkpoint.name),
    )
    names = {"fc.weight": "fc.weight"} | ({"fc.bias": "fc.bias"} if config.fc_bias else {})
    names |= layer_names("layers.0", "layer", ("post_attention_layernorm",), config.qkv_bias)
    weights, dropped = rename_weights(checkpoint, names, [EMBEDDINGS])
    check_shape(checkpoint, EMBEDDINGS, (config.vocab_size, hidden))
    return Conversion(EagleDrafter, config, weights, dropped)


def one_layer(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """Check that the drafter has one decoder layer, and return its fields."""
    if (num_layers := fields["num_hidden_layers"]) != 1:
        raise CheckpointError(
            f"An Eagle drafter must have one decoder layer to be converted, but `{name}` has {num_layers}."
        )
    return fields
