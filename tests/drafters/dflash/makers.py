"""DFlash drafters for this package's loop."""

from typing import Any

import torch
from transformers import PreTrainedModel

from transformers_falcon_spec import DFlashDrafter, SpeculationConfig


def make_dflash_drafter(
    target: PreTrainedModel, draft_options: dict[str, Any] | None = None, **options: Any
) -> DFlashDrafter:
    """A drafter for `target` in its dtype, in eval mode; `options` are fields of its config."""
    layers = [0] if target.config.get_text_config(decoder=True).num_hidden_layers == 2 else [0, 1]
    sizes = {"num_hidden_layers": 2, "block_size": 4, "target_layer_ids": layers}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        drafter = DFlashDrafter.from_target(target, **{**sizes, **options})
    drafter.generation_config = SpeculationConfig(**(draft_options or {}))
    return drafter.to(target.dtype).eval()
