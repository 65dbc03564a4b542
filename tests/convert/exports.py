"""Eagle drafters of random weights to export: version 3 in every variant, and version 1."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.families import VOCAB_SIZE
from transformers_falcon_spec import EagleDrafter
from transformers_falcon_spec.convert import convert_checkpoint, export_drafter
from transformers_falcon_spec.drafters.eagle import EagleConfig

from .foreign import DRAFT_VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 5,
    "eos_token_id": [7, 8],
    "target_name_or_path": "someone/a-target",
}
VARIANTS: dict[str, dict[str, Any]] = {  # of version 3
    "plain": {},
    "own vocabulary": {"draft_vocab_size": DRAFT_VOCAB, "rms_norm_eps": 1e-5},
    "normed residual": {"norm_before_residual": True, "attention_bias": True},
    "normed features": {"norm_before_fc": True},
    "3.1": {"fc_norm": True, "norm_output": True, "head_dim": 24},
    "llama 3.1": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
FIRST: dict[str, dict[str, Any]] = {  # of version 1
    "plain": {"fc_bias": False},
    "fc bias": {"fc_bias": True},
    "qkv bias": {"fc_bias": False, "qkv_bias": True},
}


def eagle(version: int = 3, **options: Any) -> EagleDrafter:
    """A drafter whose weights are all random, gains and biases included, and whose vocabulary is no mere beginning."""
    layers = {"feature_layers": [2, 4, 6]} if version == 3 else {}
    drafter = EagleDrafter(EagleConfig(version=version, **{**SIZES, **layers, **options})).eval()
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5 + ("norm" in name))
    if drafter.config.has_own_vocabulary:
        drafter.set_draft_vocabulary(range(3, 3 + 2 * drafter.config.num_draftable_tokens, 2))
    return drafter


def exported(drafter: Any, dest: Path, form: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights that are written."""
    export_drafter(drafter, dest, form)
    return json.loads((dest / "config.json").read_text(encoding="utf-8")), load_file(dest / "model.safetensors")


def converted_back(dest: Path) -> EagleDrafter:
    """The drafter of the exported folder."""
    convert_checkpoint(dest, dest.parent / "back")
    return EagleDrafter.from_pretrained(dest.parent / "back", dtype="auto").eval()
