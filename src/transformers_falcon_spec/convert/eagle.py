"""Eagle-1/2 checkpoints (`fc.weight` beside one `layers.0`) become an [`EagleDrafter`] of version 1.

Facts: SafeAILab/EAGLE, `eagle/model/cnets1.py`. HASS trains weights of the same form.
"""

from typing import Any

from ..drafters.eagle import EagleConfig, EagleDrafter
from ..errors import CheckpointError
from .exact import Conversion, check_shape, renamed
from .llama_layers import flag, layer_fields, layer_names
from .source import Checkpoint
from .target_facts import TargetFacts, check_size, fields_of

EMBEDDINGS = "embed_tokens.weight"  # the target's own, frozen


def convert_eagle(checkpoint: Checkpoint, target: TargetFacts | None) -> Conversion:
    """The drafter that an Eagle-1 or Eagle-2 checkpoint describes; both have the same weights.

    Raises:
        [`CheckpointError`]: config or weights are not those of a whole Eagle drafter of one layer.
        [`DrafterMismatchError`]: `target` has other sizes.
    """
    fields = one_layer(layer_fields(checkpoint.config, checkpoint.name), checkpoint.name)
    hidden = fields["hidden_size"]
    if target is not None:
        check_size("features", hidden, target.head_size, target)
        check_size("embeddings", hidden, target.embedding_size, target)
    config = EagleConfig(
        **fields,
        **fields_of(checkpoint.config, target, checkpoint.config.get("_name_or_path")),
        head_dim=hidden // fields["num_attention_heads"],  # the published code knows no other
        version=1,
        qkv_bias=flag(checkpoint.config, "qkv_bias", False, checkpoint.name),
        fc_bias=flag(checkpoint.config, "bias", True, checkpoint.name),
    )
    names = {"fc.weight": "fc.weight"} | ({"fc.bias": "fc.bias"} if config.fc_bias else {})
    names |= layer_names("layers.0", "layer", ("post_attention_layernorm",), config.qkv_bias)
    weights, dropped = renamed(checkpoint, names, [EMBEDDINGS])
    check_shape(checkpoint, EMBEDDINGS, (config.vocab_size, hidden))
    return Conversion(EagleDrafter, config, weights, dropped)


def one_layer(fields: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields, of one layer.

    Raises:
        [`CheckpointError`]: there are more layers.
    """
    if fields["num_hidden_layers"] != 1:
        raise CheckpointError(
            f"An Eagle drafter must have one decoder layer to be converted, but `{name}` has {fields['num_hidden_layers']}."
        )
    return fields
