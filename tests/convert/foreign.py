"""Foreign checkpoints of random weights, with exactly the names and fields that their software writes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.families import VOCAB_SIZE

HIDDEN = 64  # of the tiny llama target, too
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "model_type": "llama",
}


def randoms(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Weights of these shapes: gains around 1, others with a spread that keeps every part of a forward visible."""
    draws = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=draws)
        is_gain = "norm" in name
        spread = 0.2 if is_gain or len(shape) == 1 else shape[-1] ** -0.5
        weights[name] = values * spread + is_gain
    return weights


def layer_shapes(
    name: str, config: Mapping[str, Any], norms: tuple[str, ...], width: int | None = None, qkv_bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama layer's weights; attention reads `width`."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{norm}.weight": (hidden,) for norm in norms}
    for part, outputs in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"{name}.self_attn.{part}_proj.weight"] = (outputs, width or hidden)
        if qkv_bias:
            shapes[f"{name}.self_attn.{part}_proj.bias"] = (outputs,)
    shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, queries)
    shapes |= {f"{name}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    return {**shapes, f"{name}.mlp.down_proj.weight": (hidden, inner)}


def falcon(num_layers: int = 2, k_mask: int = 2, **fields: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of a published Falcon drafter."""
    config = {**SIZES, "num_hidden_layers": num_layers, "k_mask": k_mask, **fields}
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(2):
        shapes[f"lstm.weight_ih_l{index}"] = (4 * hidden, hidden if index else 2 * hidden)
        shapes[f"lstm.weight_hh_l{index}"] = (4 * hidden, hidden)
        if config.get("bias", True):
            shapes |= {f"lstm.bias_{end}_l{index}": (4 * hidden,) for end in ("ih", "hh")}
    for index in range(num_layers):
        norms = ("input_layernorm", "post_attention_layernorm")[index == 0 :]
        shapes |= layer_shapes(f"layers.{index}", config, norms, qkv_bias=config.get("qkv_bias", False))
    weights = randoms(shapes)
    for index in range(2):
        weights[f"lstm.weight_ih_l{index}"] *= 2  # gates that open and close
    return config, weights


def eagle(**fields: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of a published Eagle-1/2 drafter."""
    config = {**SIZES, **fields}
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config["vocab_size"], hidden)}
    shapes["fc.weight"] = (hidden, 2 * hidden)
    if config.get("bias", True):
        shapes["fc.bias"] = (hidden,)
    shapes |= layer_shapes("layers.0", config, ("post_attention_layernorm",), qkv_bias=config.get("qkv_bias", False))
    return config, randoms(shapes)


LAYER_IDS = [0, 2, 1]
DRAFT_VOCAB = 40
PTD_TOKEN, NUM_DRAFTED = 90, 5  # of P-EAGLE


def eagle3(draft_vocab_size: int = DRAFT_VOCAB, **fields: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of an Eagle-3 drafter in the published form."""
    config = {**SIZES, "draft_vocab_size": draft_vocab_size, **fields}
    return config, eagle3_weights("midlayer", config, config)


def eagle3_speculators(
    draft_vocab_size: int = DRAFT_VOCAB, layer_fields: Mapping[str, Any] | None = None, **fields: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of an Eagle-3 drafter in the form of speculators."""
    inner = {**SIZES, "head_dim": 16, **(layer_fields or {})}
    verifier = {"name_or_path": "someone/a-target", "architectures": ["LlamaForCausalLM"]}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
        "transformer_layer_config": inner,
        "draft_vocab_size": draft_vocab_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": LAYER_IDS,
        **fields,
    }
    return config, eagle3_weights("layers.0", config, inner)


def eagle3_weights(name: str, config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights of an Eagle-3 drafter whose layer is called `name`; the embeddings are left to the target."""
    hidden = width = sizes["hidden_size"]
    num_drafted = config["draft_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * width), "norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (num_drafted, hidden)
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    has_bias = sizes.get("attention_bias", False)
    shapes |= layer_shapes(name, sizes, norms, width=2 * hidden, qkv_bias=has_bias)
    shapes |= {f"{name}.self_attn.o_proj.bias": (hidden,)} if has_bias else {}
    shapes |= {"input_norm.weight": (3 * width,)} if config.get("norm_before_fc") else {}
    shapes |= {f"fc_norm.{index}.weight": (width,) for index in range(3)} if config.get("fc_norm") else {}
    weights = randoms(shapes)
    if num_drafted != sizes["vocab_size"]:
        ids = (
            torch.randperm(sizes["vocab_size"], generator=torch.Generator().manual_seed(5))[:num_drafted].sort().values
        )
        weights["d2t"] = ids - torch.arange(num_drafted)
        weights["t2d"] = torch.zeros(sizes["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return weights


def peagle(first: str = "midlayer", **fields: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of P-EAGLE with two layers, of which the first is called `first`, in the form of vLLM."""
    config = {**SIZES, "num_hidden_layers": 2, "draft_vocab_size": DRAFT_VOCAB, "ptd_token_id": PTD_TOKEN}
    config |= {"eagle_aux_hidden_state_layer_ids": LAYER_IDS, **fields}
    return config, peagle_weights(first, config, config)


def peagle_speculators(
    layer_fields: Mapping[str, Any] | None = None, **fields: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same as speculators writes it, which trains embeddings of its own."""
    config, _weights = eagle3_speculators(
        layer_fields={"num_hidden_layers": 2, **(layer_fields or {})},
        architectures=["PEagleSpeculator"],
        speculators_model_type="peagle",
        mask_token_id=PTD_TOKEN,
        embed_requires_grad=True,
    )
    config |= fields
    config["speculators_config"] |= {
        "algorithm": "peagle",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_DRAFTED}],
    }
    inner = config["transformer_layer_config"]
    weights = peagle_weights("layers.0", config, inner)
    more = randoms({"embed_tokens.weight": (inner["vocab_size"], inner["hidden_size"])}, seed=2)
    weights["mask_hidden"] = weights["mask_hidden"][None]
    return config, {**weights, **more}


def peagle_weights(first: str, config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those of Eagle-3, a further layer, and the feature of masks."""
    shapes: dict[str, tuple[int, ...]] = {"mask_hidden": (1, 3 * sizes["hidden_size"])}
    shapes |= layer_shapes("layers.1", sizes, ("input_layernorm", "post_attention_layernorm"))
    more = randoms(shapes, seed=1)
    more["mask_hidden"] *= HIDDEN**0.5  # as large as a feature
    return {**eagle3_weights(first, config, sizes), **more}


def medusa(
    num_heads: int = 3, num_layers: int = 1, has_lm_heads: bool = True, **fields: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of Medusa heads; the config names fewer heads, as published ones do."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": num_layers, "base_model_name_or_path": "someone/a-target"}
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for block in range(num_layers):
            shapes[f"{head}.{block}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{head}.{block}.linear.bias"] = (HIDDEN,)
        if has_lm_heads:
            shapes[f"{head}.{num_layers}.weight"] = (VOCAB_SIZE, HIDDEN)
    version = {} if has_lm_heads else {"version": "2"}
    return {**config, **version, **fields}, randoms(shapes)


def written(
    folder: Path, config: Mapping[str, Any] | None, weights: Mapping[str, Any], file: str = "pytorch_model.bin"
) -> Path:
    """The folder with config and weights, as `file`."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if file.endswith(".safetensors"):
        save_file(dict(weights), folder / file)
    else:
        torch.save(dict(weights), folder / file)
    return folder
