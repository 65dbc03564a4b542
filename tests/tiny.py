"""Tiny random targets of many families, and drafters for them: seeded, offline, built in milliseconds.

The package is imported inside functions only, so that pytest's type-checking hook is in place before it.
"""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 97
PEAKEDNESS = 12.0  # weights this much larger than initialised: the likeliest token has about 0.25 instead of 0.01
MIX = ["sliding_attention", "full_attention", "sliding_attention"]

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MHA = {name: value for name, value in _COMMON.items() if name != "num_key_value_heads"}
_GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "pad_token_id": 0}
_GPT |= {"bos_token_id": 1, "eos_token_id": 2}
_MLA = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_MLA |= {"qk_nope_head_dim": 16, "v_head_dim": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON),
    "qwen3": ("Qwen3Config", {**_COMMON, "head_dim": 16}),
    "mistral": ("MistralConfig", {**_COMMON, "sliding_window": 8}),
    "gemma2": ("Gemma2Config", {**_COMMON, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_COMMON, "head_dim": 16, "sliding_window": 8, "layer_types": MIX, "query_pre_attn_scalar": 16},
    ),
    "phi3": ("Phi3Config", {**_COMMON, "sliding_window": None}),
    "cohere": ("CohereConfig", {**_COMMON, "logit_scale": 0.5}),
    "granite": ("GraniteConfig", {**_COMMON, "logits_scaling": 2.0}),
    "minicpm3": ("MiniCPM3Config", {**_COMMON, **_MLA}),
    "llama4": (
        "Llama4TextConfig",
        {**_COMMON, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"attention_chunk_size": 8, "interleave_moe_layer_step": 2}
        | {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
    ),
    "gpt2": ("GPT2Config", _GPT),
    "gpt_neox": ("GPTNeoXConfig", _MHA),
    "opt": ("OPTConfig", {**_MHA, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": (
        "BloomConfig",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "n_layer": 3,
            "n_head": 4,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "window_size": 8}
        | {"attention_types": [[["global", "local"], 2]], "max_position_embeddings": 256, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "mpt": (
        "MptConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256, "use_cache": True},
    ),
    "falcon_alibi": ("FalconConfig", {**_MHA, "alibi": True}),
    "mamba": ("MambaConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
}
TREE_FAMILIES = (
    *("llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "cohere", "granite", "minicpm3", "llama4"),
    *("gpt2", "gpt_neox", "opt"),
)
CHAIN_FAMILIES = ("bloom", "gpt_neo", "mpt", "falcon_alibi")


def make_target(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A fresh target in eval mode, with peaked logits and no EOS among its generation defaults; `changes` go to its config."""
    name, fields = FAMILIES[family]
    config = getattr(transformers, name)(**{**fields, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() >= 2:
                weight.mul_(PEAKEDNESS)
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    return target


def make_drafter(target: PreTrainedModel, seed: int = 1, **options: Any) -> Any:
    """A fresh Falcon drafter for `target` in its dtype, in eval mode; `options` are fields of `FalconSpecConfig`."""
    from transformers_falcon_spec import FalconSpecDrafter  # noqa: PLC0415  see the head of this file

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = FalconSpecDrafter.from_target(target, **options)
    return drafter.to(target.dtype).eval()


def make_prompt(length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random ids `[1, length]` without special tokens."""
    return torch.randint(3, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))
