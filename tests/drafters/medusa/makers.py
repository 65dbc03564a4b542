"""Medusa drafters with weights that matter; fresh ones only repeat what the target's head says."""

from typing import Any

import torch

from transformers_falcon_spec import MedusaDrafter


def make_medusa(target: Any, seed: int = 1, **options: Any) -> MedusaDrafter:
    """A drafter for `target` in its dtype, in eval mode, every weight drawn."""
    drafter = MedusaDrafter.from_target(target, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    return drafter.to(target.dtype).eval()
