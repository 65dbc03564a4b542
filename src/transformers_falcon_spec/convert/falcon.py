"""Converting Falcon checkpoints of the paper's authors (field `k_mask`, weights `lstm.*`) to a [`FalconSpecDrafter`].

The published code runs its LSTM over the batch axis, so every token starts from a zero state: `recurrence="token"`.
The checkpoints hold no tree, so the drafter gets the paper's. The published code cuts blocks from the first row on;
this package ends them at the newest row. Source: Bestpay-inc/Falcon, `models/cnets.py`.
"""

import torch

from ..drafters.falcon import FalconSpecConfig, FalconSpecDrafter
from ..drafters.falcon.paper_tree import paper_tree
from ..errors import CheckpointError
from .building import Conversion, check_shape, rename_weights
from .eagle import EMBEDDINGS
from .llama_layers import flag, layer_fields, layer_names
from .source import Checkpoint
from .target_facts import TargetFacts, check_widths, fields_of

NUM_RECURRENT_LAYERS = 2
DROPOUT = 0.1


def convert_falcon(checkpoint: Checkpoint, target: TargetFacts | None) -> Conversion:
    """Convert a Falcon checkpoint."""
    config = _config(checkpoint, target)
    names: dict[str, str] = {}
    for layer in range(NUM_RECURRENT_LAYERS):
        parts = [f"{kind}_{end}_l{layer}" for kind in _kinds(checkpoint) for end in ("ih", "hh")]
        names |= {f"lstm.{part}": f"recurrence.{part}" for part in parts}
    for layer in range(config.num_hidden_layers):
        norms = ("post_attention_layernorm",) if layer == 0 else ("input_layernorm", "post_attention_layernorm")
        names |= layer_names(f"layers.{layer}", f"layers.{layer}", norms, config.attention_bias)
    weights, dropped = rename_weights(checkpoint, names, [EMBEDDINGS])
    check_shape(checkpoint, EMBEDDINGS, (config.vocab_size, config.hidden_size))
    filled = _fill(weights, config, has_recurrent_bias="bias" in _kinds(checkpoint))
    return Conversion(FalconSpecDrafter, config, weights, dropped, filled)


def _kinds(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the kinds of weights that the LSTM has."""
    return ("weight", "bias") if flag(checkpoint.config, "bias", True, checkpoint.name) else ("weight",)


def _config(checkpoint: Checkpoint, target: TargetFacts | None) -> FalconSpecConfig:
    config = checkpoint.config
    block_size = config["k_mask"]
    if type(block_size) is not int or block_size < 1:
        raise CheckpointError(f"`k_mask` must be a whole number of at least 1, but it is {block_size!r}.")
    fields = layer_fields(config, checkpoint.name)
    hidden = fields["hidden_size"]
    check_widths(hidden, target)
    return FalconSpecConfig(
        **fields,
        **fields_of(config, target, config.get("_name_or_path")),
        attention_bias=flag(config, "qkv_bias", False, checkpoint.name),
        block_size=block_size,
        recurrence="token",
        block_position_embedding=False,
        num_recurrent_layers=NUM_RECURRENT_LAYERS,
        recurrent_dropout=DROPOUT,
        draft_tree=paper_tree(block_size).to_json(),
    )


def _fill(weights: dict[str, torch.Tensor], config: FalconSpecConfig, has_recurrent_bias: bool) -> dict[str, float]:
    """Add zeros for the biases that the source does not have, and return their names."""
    filled = []
    if config.attention_bias:  # the source has them on queries, keys and values only, this package on the output, too
        filled += [f"layers.{layer}.self_attn.o_proj.bias" for layer in range(config.num_hidden_layers)]
    sizes = dict.fromkeys(filled, config.hidden_size)
    if not has_recurrent_bias:
        parts = [f"recurrence.bias_{end}_l{layer}" for layer in range(NUM_RECURRENT_LAYERS) for end in ("ih", "hh")]
        sizes |= dict.fromkeys(parts, 4 * config.hidden_size)
    some_weight = next(iter(weights.values()))
    weights |= {name: torch.zeros(size, dtype=some_weight.dtype) for name, size in sizes.items()}
    return dict.fromkeys(sizes, 0.0)
