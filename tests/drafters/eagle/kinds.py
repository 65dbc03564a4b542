"""The kinds of Eagle drafter that tests go through, tiny and in double precision."""

from typing import Any

import torch

from tests.drafters.texts import WIDTH
from tests.tiny import make_target, with_all_drawn, with_list
from transformers_falcon_spec import EagleDrafter, SpeculationConfig
from transformers_falcon_spec.generation.target import Target

KINDS: dict[str, dict[str, Any]] = {
    "eagle-1": {"version": 1},
    "eagle-1 with biases": {"version": 1, "qkv_bias": True, "fc_bias": False, "num_key_value_heads": 1},
    "eagle-1 of fewer tokens": {"version": 1, "draft_vocab_size": 40},
    "eagle-3": {"version": 3, "feature_layers": (0, 1, -1), "draft_vocab_size": 40},
    "eagle-3.1": {"version": 3, "feature_layers": (1, -1), "fc_norm": True, "norm_output": True, "qkv_bias": True},
    "speculators": {
        "version": 3,
        "feature_layers": (0, 1),
        "norm_before_residual": True,
        "norm_before_fc": True,
        "draft_vocab_size": 30,
    },
}


def make_eagle_target() -> Any:
    """A target of width 16 with features to read, in double precision."""
    return make_target(hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2).double()


def make_eagle(target: Any, kind: str, seed: int = 1, **options: Any) -> EagleDrafter:
    """A drafter in the target's dtype with weights large enough that every one of them shows; norms and biases, too."""
    names = ("dynamic_tree", "num_tree_nodes", "tree_depth", "tree_top_k")
    trees = {name: options.pop(name) for name in names if name in options}
    options = {**KINDS[kind], **options}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        num_tokens = options.pop("draft_vocab_size", None)
        ids = None if num_tokens is None else torch.randperm(target.config.vocab_size)[:num_tokens].tolist()
        drafter = with_all_drawn(with_list(EagleDrafter.from_target, target, ids, **options))
        for weight in drafter.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
            else:
                weight.mul_(1.5)
    drafter.generation_config = SpeculationConfig(**trees)
    return drafter.to(target.dtype).eval()


def view(target: Any, drafter: EagleDrafter) -> Target:
    """What the drafter may use of the target."""
    return Target(target, drafter.feature_layers)
