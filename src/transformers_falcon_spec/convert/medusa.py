"""Converting Medusa heads (files `medusa_lm_head.*`): Medusa-1 has LM heads of its own, v2 uses the target's.

The number of heads is read from the weights, because published configs name fewer. Sources: FasterDecoding/Medusa,
arXiv 2401.10774.
"""

import re
from functools import partial

from transformers import PreTrainedModel

from ..drafters.medusa import MedusaConfig, MedusaDrafter
from ..errors import CheckpointError
from ..generation.head import head_width
from .conversion import Conversion, rename_weights
from .formats import shortened
from .source import Checkpoint
from .target_facts import check_size, fields_of

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")


def convert_medusa(checkpoint: Checkpoint, target: PreTrainedModel | None, has_lm_heads: bool = True) -> Conversion:
    """Convert Medusa heads; v2 heads end in the LM head of `target`, which gives the size of the vocabulary."""
    num_heads, num_layers = _counts(checkpoint)
    parts = [f"{layer}.linear.{part}" for layer in range(num_layers) for part in ("weight", "bias")]
    parts += [f"{num_layers}.weight"] if has_lm_heads else []
    names = {f"{head}.{part}": f"heads.{head}.{part}" for head in range(num_heads) for part in parts}
    weights, _dropped = rename_weights(checkpoint, names)
    hidden_size = weights["heads.0.0.linear.weight"].shape[-1]
    known = dict(checkpoint.config)
    if has_lm_heads:
        known["vocab_size"] = len(weights[f"heads.0.{num_layers}.weight"])
    if target is not None:
        check_size("features", hidden_size, head_width(target), target)
    config = MedusaConfig(
        **fields_of(known, target, known.get("base_model_name_or_path")),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_layers=num_layers,
        has_lm_heads=has_lm_heads,
    )
    return Conversion(MedusaDrafter, config, weights)


convert_medusa_v2 = partial(convert_medusa, has_lm_heads=False)


def _counts(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the number of heads and of blocks in each; the config must give the same number of blocks."""
    found = [match for key in checkpoint.tensors if (match := _BLOCK.fullmatch(key))]
    if not found:
        raise CheckpointError(
            f"Medusa heads must have weights called `0.0.linear.weight` and so on, but those of `{checkpoint.name}` "
            f"are called {shortened(checkpoint.tensors)}."
        )
    num_heads = 1 + max(int(match[1]) for match in found)
    num_layers = 1 + max(int(match[2]) for match in found)
    stated = checkpoint.config.get("medusa_num_layers", num_layers)
    if stated != num_layers:
        raise CheckpointError(
            f"`medusa_num_layers` must be the number of blocks in each head, {num_layers} in `{checkpoint.name}`, but "
            f"it is {stated!r}. Fetch config and weights again: they do not belong together."
        )
    return num_heads, num_layers
