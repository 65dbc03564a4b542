"""Drafters of every kind with LoRA adapters whose weights are not zero.

The package is imported inside functions only, so that pytest's type-checking hook is in place before it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from tests import tiny
from tests.tiny import make_drafter, make_target


def make_eagle(target: Any, **options: Any) -> Any:
    """A fresh Eagle drafter for `target`, in its type."""
    return tiny.make_eagle(target, **options).to(target.dtype).eval()


def make_medusa(target: Any, **options: Any) -> Any:
    """A fresh Medusa drafter for `target`, in its type."""
    from transformers_falcon_spec import MedusaDrafter  # noqa: PLC0415  see the head of this file

    return MedusaDrafter.from_target(target, **options).to(target.dtype).eval()


def make_diffusion(target: Any) -> Any:
    """A fresh diffusion drafter for `target`, in its type."""
    from transformers_falcon_spec import DiffusionDrafter  # noqa: PLC0415  see the head of this file

    return DiffusionDrafter.from_target(target, num_hidden_layers=1).to(target.dtype).eval()


def make_dflash(target: Any) -> Any:
    """A fresh DFlash drafter for `target`, in its type."""
    from transformers_falcon_spec import DFlashDrafter  # noqa: PLC0415  see the head of this file

    # The mask is padding by default, a vector of zeros here, from which no query learns.
    sizes = {"num_hidden_layers": 1, "block_size": 4, "target_layer_ids": [0], "mask_token_id": 7}
    return DFlashDrafter.from_target(target, **sizes).to(target.dtype).eval()


def make_parallel_eagle(target: Any) -> Any:
    """A fresh P-EAGLE drafter for `target`, in its type."""
    from transformers_falcon_spec import ParallelEagleDrafter  # noqa: PLC0415  see the head of this file

    sizes = {"num_hidden_layers": 2, "block_size": 3, "feature_layers": (1, -1)}
    return ParallelEagleDrafter.from_target(target, **sizes).to(target.dtype).eval()


NEWEST = {"block_size": 3, "recurrence": "token", "shortcut": True, "newest_row": True, "transition_rank": 8}
KINDS: dict[str, Callable[[Any], Any]] = {
    "falcon": lambda target: make_drafter(target, block_size=2),
    "falcon, as shipped": lambda target: make_drafter(target, **NEWEST),
    "eagle-1": make_eagle,
    "eagle-3": lambda target: make_eagle(target, version=3, feature_layers=(1, -1)),
    "medusa": lambda target: make_medusa(target, num_heads=2, has_lm_heads=False),
    "diffusion": make_diffusion,
    "dflash": make_dflash,
    "medusa, heads of its own": lambda target: make_medusa(target, num_heads=2),
}
EVERY = {**KINDS, "eagle, parallel": make_parallel_eagle}  # which nothing here trains


def saved_drafter(kind: str, folder: Path, **target_options: Any) -> Path:
    """A drafter of this kind for a tiny target, on disk."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        EVERY[kind](make_target(**target_options)).save_pretrained(folder)
    return folder


def adapted(drafter: Any, seed: int = 0, **options: Any) -> peft.PeftModel:
    """`drafter` with an adapter on all its linear layers."""
    config = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = peft.get_peft_model(drafter, config).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name or "modules_to_save" in name:
                    weight.normal_(std=0.2)
    return model


def switch_off(target: Any) -> None:
    """Let no adapter of `target` be heard, as its `disable_adapters` does, which Transformers 5.24 refuses with PEFT before 0.22."""
    for module in target.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(enabled=False)
