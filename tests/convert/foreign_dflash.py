"""Published DFlash drafters of random weights: z-lab's form, which SpecForge writes, too, DFlash2, DSpark, speculators'."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tests.tiny import make_target

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
RANK = 8  # of the scores between neighbours
SECOND = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": RANK, "selector_top_k": 6}


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
        tensors |= copies(copies_of)
    return config, tensors


def dspark(head_type: str = "vanilla", rank: int = RANK, **fields: Any) -> Parts:
    """Config and weights as DeepSpec writes them, copies of what is the target's included; a rank of 0 is its DFlash."""
    config, tensors = dflash(architectures=["Qwen3DSparkModel"], tie_word_embeddings=False)
    config |= {**config.pop("dflash_config"), "block_size": BLOCK - 1, "num_anchors": 512, "markov_rank": rank}
    del config["auto_map"]
    if rank:
        config["markov_head_type"] = head_type
    tensors |= copies(make_target("llama", num_hidden_layers=TARGET_LAYERS)) | markov(head_type, rank)
    confidence = {"enable_confidence_head": True, "confidence_head_with_markov": rank > 0}
    return {**config, **confidence, **fields}, tensors


def dspark_speculators(head_type: str = "vanilla", **fields: Any) -> Parts:
    """Config and weights of a DSpark as speculators writes them."""
    fields = {"block_size": BLOCK - 1, "sample_from_anchor": True, **fields}
    config, tensors = speculators(speculators_model_type="dspark", architectures=["DSparkSpeculator"], **fields)
    config |= {"markov_rank": RANK, "markov_head_type": head_type}
    config |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    return config, {**tensors, **markov(head_type, RANK)}


def copies(target: Any) -> dict[str, Tensor]:
    """Embeddings and head of a target."""
    return {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach().clone(),
        "lm_head.weight": target.get_output_embeddings().weight.detach().clone(),
    }


def markov(head_type: str, rank: int) -> dict[str, Tensor]:
    """The weights that a DSpark has besides those of DFlash."""
    confidence: dict[str, tuple[int, ...]] = {
        "confidence_head.proj.weight": (1, HIDDEN + rank),
        "confidence_head.proj.bias": (1,),
    }
    if not rank:
        return randoms(confidence, seed=1)

    tables = {f"markov_head.markov_w{number}.weight": (SIZES["vocab_size"], rank) for number in (1, 2)}
    gate = {"markov_head.gate_proj.weight": (rank, HIDDEN + rank), "markov_head.gate_proj.bias": (rank,)}
    more = randoms({**confidence, **tables, **(gate if head_type == "gated" else {})}, seed=1)
    return more | {name: more[name] * 2 for name in tables}  # so that the token before matters


def weights(sizes: Mapping[str, Any], num_read: int) -> dict[str, Tensor]:
    """The weights that all forms share."""
    hidden = sizes["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, num_read * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("hidden_norm", "norm")}
    for index in range(sizes["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{index}", sizes, NORMS)
        shapes |= {f"layers.{index}.self_attn.{part}_norm.weight": (sizes["head_dim"],) for part in "qk"}
    return randoms(shapes)
