"""Draft models of every family, tiny and in double precision, and drafters made of them."""

from typing import Any

import torch
from torch import nn

from tests.drafters.easyspec.twin import with_backend
from tests.families import MIX
from tests.tiny import make_target
from transformers_falcon_spec import LayerParallelDrafter, SpeculationConfig
from transformers_falcon_spec.generation.target import Target

SMALL = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 7, "num_attention_heads": 4}
GROUPS = [[0], [1, 2], [3, 4, 5], [6]]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "layer_types": [*MIX, *MIX, *MIX, MIX[0]]}),
    "qwen3": ("qwen3", {"head_dim": 8, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"num_key_value_heads": 4}),
}


def make_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A model whose norms differ from layer to layer; gains are powers of two, for norms multiply by them in float32."""
    family, fields = KINDS[kind]
    model = make_target(family, seed, **{**SMALL, **fields, **changes}).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                powers = torch.randint(-1, 2, module.weight.shape, generator=draw)
                module.weight.copy_(2.0**powers)
            if isinstance(getattr(module, "bias", None), nn.Parameter):
                module.bias.copy_(torch.randn(module.bias.shape, generator=draw) * 0.3)
    return model.requires_grad_(False)


def make_drafter(target: Any, kind: str = "llama", backend: str = "fused", **options: Any) -> LayerParallelDrafter:
    """A drafter in double precision that knows nothing of `target` but its vocabulary."""
    names = ("dynamic_tree", "num_tree_nodes", "tree_depth", "tree_top_k")
    trees = {name: options.pop(name) for name in names if name in options}
    changes = options.pop("changes", {})
    model = make_model(kind, seed=1, **changes)
    drafter = LayerParallelDrafter.wrap(model, target, **{"layer_groups": GROUPS, **options})
    drafter.generation_config = SpeculationConfig(**trees)
    return with_backend(drafter, backend)


def view(target: Any) -> Target:
    """What the drafter may use of the target."""
    return Target(target, ())
