"""Falcon checkpoints of the paper's authors (fields `k_mask`, weights `lstm.*`) become a [`FalconSpecDrafter`].

The published code runs its LSTM over the batch axis, so that every token starts from a zero state: `recurrence="token"`.
The checkpoints hold no tree; the drafter gets the paper's. Where the code cuts blocks from the first row fed, this package ends them at the newest one. Facts: Bestpay-inc/Falcon, `models/cnets.py`.
"""

import torch

from ..drafters.falcon import FalconSpecConfig, FalconSpecDrafter
from ..drafters.falcon.paper_tree import paper_tree
from ..errors import CheckpointError
from .exact import Conversion, check_shape, renamed
from .llama_layers import flag, layer_fields, layer_names
from .source import Checkpoint
from .target_facts import TargetFacts, check_size, fields_of

NUM_RECURRENT_LAYERS = 2
DROPOUT = 0.1
EMBEDDINGS = "embed_tokens.weight"  # the target's own, frozen


def convert_falcon(checkpoint: Checkpoint, target: TargetFacts | None) -> Conversion:
    """The drafter that a Falcon checkpoint describes.

    Raises:
        [`CheckpointError`]: config or weights are not those of a whole Falcon drafter.
        [`DrafterMismatchError`]: `target` has other sizes.
    """
    config = _config(checkpoint, target)
    names: dict[str, str] = {}
    for layer in range(NUM_RECURRENT_LAYERS):
        parts = [f"{kind}_{end}_l{layer}" for kind in _kinds(checkpoint) for end in ("ih", "hh")]
        names |= {f"lstm.{part}": f"recurrence.{part}" for part in parts}
    for layer in range(config.num_hidden_layers):
        norms = ("post_attention_layernorm",) if layer == 0 else ("input_layernorm", "post_attention_layernorm")
        place = f"layers.{layer}"
        names |= layer_names(place, place, norms, config.attention_bias)
    weights, dropped = renamed(checkpoint, names, [EMBEDDINGS])
    check_shape(checkpoint, EMBEDDINGS, (config.vocab_size, config.hidden_size))
    filled = _fill(weights, config, has_recurrent_bias="bias" in _kinds(checkpoint))
    return Conversion(FalconSpecDrafter, config, weights, dropped, filled)


def _kinds(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Kinds of weight of the LSTM."""
    return ("weight", "bias") if flag(checkpoint.config, "bias", True, checkpoint.name) else ("weight",)


def _config(checkpoint: Checkpoint, target: TargetFacts | None) -> FalconSpecConfig:
    config = checkpoint.config
    block_size = config["k_mask"]
    if type(block_size) is not int or block_size < 1:
        raise CheckpointError(f"`k_mask` must be a whole number of at least 1, but it is {block_size!r}.")
    fields = layer_fields(config, checkpoint.name)
    hidden = fields["hidden_size"]
    if target is not None:
        check_size("features", hidden, target.head_size, target)
        check_size("embeddings", hidden, target.embedding_size, target)
    return FalconSpecConfig(
        **fields,
        **fields_of(config, target, config.get("_name_or_path")),
        head_dim=hidden // fields["num_attention_heads"],  # the published code knows no other
        attention_bias=flag(config, "qkv_bias", False, checkpoint.name),
        block_size=block_size,
        recurrence="token",
        block_position_embedding=False,
        num_recurrent_layers=NUM_RECURRENT_LAYERS,
        recurrent_dropout=DROPOUT,
        draft_tree=paper_tree(block_size).to_json(),
    )


def _fill(weights: dict[str, torch.Tensor], config: FalconSpecConfig, has_recurrent_bias: bool) -> dict[str, float]:
    """Add zeros for biases that the source does without, and tell which."""
    filled = []
    if config.attention_bias:  # there on queries, keys and values alone; here the output has one, too
        filled += [f"layers.{layer}.self_attn.o_proj.bias" for layer in range(config.num_hidden_layers)]
    sizes = dict.fromkeys(filled, config.hidden_size)
    if not has_recurrent_bias:
        parts = [f"recurrence.bias_{end}_l{layer}" for layer in range(NUM_RECURRENT_LAYERS) for end in ("ih", "hh")]
        sizes |= dict.fromkeys(parts, 4 * config.hidden_size)
    some_weight = next(iter(weights.values()))
    weights |= {name: torch.zeros(size, dtype=some_weight.dtype) for name, size in sizes.items()}
    return dict.fromkeys(sizes, 0.0)
