"""Published DFlash drafters of random weights: z-lab's form, which SpecForge writes, too, DFlash2, and speculators'."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .foreign import HIDDEN, SIZES, layer_shapes, randoms

Parts = tuple[dict[str, Any], dict[str, Tensor]]
MASK, BLOCK = 90, 5
TARGET_LAYERS = 4  # of the target
READ = [0, 2]  # its layers whose outputs are read
NORMS = ("input_layernorm", "post_attention_layernorm")
LAYERS: dict[str, Any] = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 24, "rope_theta": 777.0}
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 2,
}
SECOND = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 8, "selector_top_k": 6}


def dflash(inner: Mapping[str, Any] | None = None, **fields: Any) -> Parts:
    """Config and weights as z-lab's first repositories have them; `inner` are more fields of `dflash_config`."""
    config = {
        **LAYERS,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "block_size": BLOCK,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": READ, **(inner or {})},
        **fields,
    }
    return config, weights(config, len(config["dflash_config"]["target_layer_ids"]))


def newer(**fields: Any) -> Parts:
    """The same as newer repositories have them: the size of a block and all of the rotary parameters lie deeper."""
    config, tensors = dflash({"block_size": BLOCK}, rope_parameters={"rope_theta": 777.0, "rope_type": "default"})
    given = {name: value for name, value in config.items() if name not in ("block_size", "rope_theta", "rope_scaling")}
    return {**given, **fields}, tensors


def dflash2(inner: Mapping[str, Any] | None = None, **fields: Any) -> Parts:
    """Config and weights of a DFlash2 drafter."""
    config, tensors = dflash({**SECOND, **(inner or {})}, architectures=["DFlash2DraftModel"], **fields)
    taps, groups, rank = SECOND["conv_kernel_size"], HIDDEN // SECOND["conv_group_size"], SECOND["selector_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.predecessor_codebook": (config["vocab_size"], rank),
        "candidate_selector.successor_codebook": (config["vocab_size"], rank),
        "candidate_selector.hidden_projection.weight": (rank, HIDDEN),
    }
    for index in range(config["num_hidden_layers"]):
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{index}.{part}.base_kernel"] = (2, taps, HIDDEN)
            shapes[f"layers.{index}.{part}.kernel_projection.weight"] = (2 * taps * groups, HIDDEN)
    more = randoms(shapes, seed=1)
    for name in ("predecessor", "successor"):
        more[f"candidate_selector.{name}_codebook"] *= 4  # so that the token before matters
    more |= {name: values * HIDDEN**0.5 / 2 for name, values in more.items() if name.endswith("base_kernel")}
    return config, {**tensors, **more}


def speculators(layer_fields: Mapping[str, Any] | None = None, copies_of: Any = None, **fields: Any) -> Parts:
    """Config and weights as speculators writes them, with copies of what is the target's if one is given."""
    inner = {**LAYERS, "rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}, **(layer_fields or {})}
    del inner["rope_theta"]
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "someone/a-target"}},
        "transformer_layer_config": inner,
        "draft_vocab_size": inner["vocab_size"],
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [each + 1 for each in READ],  # hidden states, not layers
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        **fields,
    }
    tensors = weights(inner, len(READ))
    if copies_of is not None:
        tensors["embed_tokens.weight"] = copies_of.get_input_embeddings().weight.detach().clone()
        tensors["lm_head.weight"] = copies_of.get_output_embeddings().weight.detach().clone()
    return config, tensors


def weights(sizes: Mapping[str, Any], num_read: int) -> dict[str, Tensor]:
    """The weights that all forms share."""
    hidden = sizes["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, num_read * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("hidden_norm", "norm")}
    for index in range(sizes["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{index}", sizes, NORMS)
        shapes |= {f"layers.{index}.self_attn.{part}_norm.weight": (sizes["head_dim"],) for part in "qk"}
    return randoms(shapes)
