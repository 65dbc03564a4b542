"""DFlash drafters for this package's loop."""

from typing import Any

import torch
from transformers import PreTrainedModel

from transformers_falcon_spec import DFlashConfig, DFlashDrafter, SpeculationConfig
from transformers_falcon_spec.drafters.config_fields import own_fields, target_fields


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


def from_stock(stock: PreTrainedModel, target: PreTrainedModel) -> DFlashDrafter:
    """The drafter with the weights of Transformers' own, on its device and in its type."""
    fields = {name: value for name, value in stock.config.to_dict().items() if name in own_fields(DFlashConfig)}
    config = DFlashConfig(**{**fields, **target_fields(target)})
    config._attn_implementation = stock.config._attn_implementation
    drafter = DFlashDrafter(config)
    drafter.load_state_dict(stock.state_dict())
    return drafter.to(stock.device, stock.dtype).eval()
