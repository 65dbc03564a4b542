"""Converting Falcon checkpoints of the paper's authors (field `k_mask`, weights `lstm.*`) to a [`FalconSpecDrafter`].

The published code runs its LSTM over the batch axis, so every token starts from a zero state: `recurrence="token"`.
The checkpoints hold no tree, so the drafter gets the paper's. The published code cuts blocks from the first row on;
this package ends them at the newest row. Source: Bestpay-inc/Falcon, `models/cnets.py`.
"""

import torch
from transformers import PreTrainedModel

from ..drafters.falcon import FalconSpecConfig, FalconSpecDrafter, paper_tree
from ..errors import CheckpointError
from .conversion import COMPARED, EMBEDDINGS, Conversion, has_own_embeddings, rename_weights
from .llama_layers import flag, layer_fields, layer_names
from .source import Checkpoint
from .target_facts import check_widths, fields_of

NUM_RECURRENT_LAYERS = 2
DROPOUT = 0.1


def convert_falcon(checkpoint: Checkpoint, target: PreTrainedModel | None) -> Conversion:
    """Convert a Falcon checkpoint; biases that it does without are filled in with zeros."""
    config = _config(checkpoint, target)
    has_recurrent_bias = flag(checkpoint.config, "bias", True, checkpoint.name)
    ends = [f"{end}_l{layer}" for layer in range(NUM_RECURRENT_LAYERS) for end in ("ih", "hh")]
    kinds = ("weight", "bias") if has_recurrent_bias else ("weight",)
    names = {f"lstm.{kind}_{end}": f"recurrence.{kind}_{end}" for kind in kinds for end in ends}
    sizes = {} if has_recurrent_bias else {f"recurrence.bias_{end}": 4 * config.hidden_size for end in ends}
    for layer in range(config.num_hidden_layers):
        norms = ("post_attention_layernorm",) if layer == 0 else ("input_layernorm", "post_attention_layernorm")
        names |= layer_names(f"layers.{layer}", f"layers.{layer}", norms, config.attention_bias)
        if config.attention_bias:  # the source has them on queries, keys and values only
            sizes[f"layers.{layer}.self_attn.o_proj.bias"] = config.hidden_size
    names |= {EMBEDDINGS: EMBEDDINGS} if config.own_embeddings else {}
    weights, dropped = rename_weights(checkpoint, names, {EMBEDDINGS: COMPARED})
    dtype = next(iter(weights.values())).dtype
    weights |= {name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()}
    return Conversion(FalconSpecDrafter, config, weights, dropped, filled=dict.fromkeys(sizes, 0.0))


def _config(checkpoint: Checkpoint, target: PreTrainedModel | None) -> FalconSpecConfig:
    config = checkpoint.config
    block_size = config["k_mask"]
    if type(block_size) is not int or block_size < 1:
        raise CheckpointError(f"`k_mask` must be a whole number of at least 1, but it is {block_size!r}.")
    fields = layer_fields(config, checkpoint.name)
    check_widths(fields["hidden_size"], target)
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
        own_embeddings=has_own_embeddings(checkpoint, target),
    )
