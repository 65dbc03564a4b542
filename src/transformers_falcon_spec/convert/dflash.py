"""Converting DFlash drafters of Transformers (Muse Glimmer's assistants) to a [`DFlashDrafter`], weight for weight.

Config and weights do not name the vocabulary, which is the target's. Source: Transformers, `muse_glimmer_assistant`.
"""

import torch
from transformers import PreTrainedModel

from ..drafters.dflash import DFlashConfig, DFlashDrafter
from .conversion import Conversion, rename_weights
from .source import Checkpoint
from .target_facts import check_widths, needs_target


def convert_dflash(checkpoint: Checkpoint, target: PreTrainedModel | None) -> Conversion:
    """Convert a DFlash drafter for `target`, whose embeddings and head it uses."""
    if target is None:
        raise needs_target("how large the vocabulary is")
    config = DFlashConfig.of_stock(checkpoint.config, target)
    check_widths(config.hidden_size, target)
    with torch.device("meta"):
        names = {name: name for name in DFlashDrafter(config).state_dict()}
    weights, _dropped = rename_weights(checkpoint, names)
    return Conversion(DFlashDrafter, config, weights)
