"""The table of model families: a tiny configuration of each, and what its targets can verify.

The oldest supported Transformers has every class named here, but those of `NEWER` and `_SINCE_OLDEST`. Two layers, or as
many as it takes to have each kind.
"""

from dataclasses import dataclass
from typing import Any

import transformers

VOCAB_SIZE = 97
MIX = ["sliding_attention", "full_attention"]
_RENAMES_CACHES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (
    5,
    24,
)  # those of recurrent layers alone

Fields = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Args:
        config (`str`): Class in Transformers.
        fields (`dict`): What makes it tiny.
        form (`str`): What the probe must say: `"tree"`, `"paths"`, `"chain"`, `"plain"`, or `"refused"` by an error.
    """

    config: str
    fields: Fields
    form: str = "tree"


_IDS: Fields = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_THREE: Fields = {
    **_IDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_GPT = _IDS | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
_MLA: Fields = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_MLA |= {"qk_nope_head_dim": 16, "v_head_dim": 16}
_MAMBA: Fields = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_MAMBA |= {"mamba_chunk_size": 16}
_DELTA: Fields = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
_DELTA |= {"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16}
_FEW_EXPERTS: Fields = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _two(**changes: Any) -> Fields:
    """Two layers, with changes."""
    return {**_THREE, "num_hidden_layers": 2, **changes}


def _without(name: str, fields: Fields) -> Fields:
    return {other: value for other, value in fields.items() if other != name}


_MHA = _without("num_key_value_heads", _THREE)
_ROUTED: Fields = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_DEEPSEEK = _two(**_MLA, **_ROUTED, n_shared_experts=1)
_INDEXER: Fields = {"index_head_dim": 16, "index_n_heads": 4}
_GEMMA3N = _two(num_hidden_layers=4, head_dim=16, sliding_window=8, layer_types=MIX * 2, altup_num_inputs=2)
_GEMMA3N |= {"laurel_rank": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
_GEMMA3N |= {"activation_sparsity_pattern": [0.0] * 4}
_GEMMA4 = _two(num_hidden_layers=4, head_dim=16, sliding_window=8, layer_types=MIX * 2, global_head_dim=16)
_GEMMA4 |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
_GPT2LIKE = _GPT | {"n_layer": 2}
_FALCON = _without("num_key_value_heads", _two(alibi=False))

_DENSE = {
    "llama": Family("LlamaConfig", _THREE),
    "qwen2": Family("Qwen2Config", _two()),
    "qwen3": Family("Qwen3Config", {**_THREE, "head_dim": 16}),
    "gemma": Family("GemmaConfig", _two(head_dim=16)),
    "phi": Family("PhiConfig", _two()),
    "phi3": Family("Phi3Config", {**_THREE, "sliding_window": None}),
    "gpt_neox": Family("GPTNeoXConfig", _MHA),
    "glm": Family("GlmConfig", _two(head_dim=16)),
    "glm4": Family("Glm4Config", _two(head_dim=16)),
    "olmo": Family("OlmoConfig", _two()),
    "olmo2": Family("Olmo2Config", _two()),
    "falcon": Family("FalconConfig", _FALCON),
    "falcon_new_block": Family("FalconConfig", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "granite": Family("GraniteConfig", {**_THREE, "logits_scaling": 2.0}),
    "cohere": Family("CohereConfig", {**_THREE, "logit_scale": 0.5}),
    "smollm3": Family("SmolLM3Config", _two(no_rope_layers=[1, 0])),
    "stablelm": Family("StableLmConfig", _two()),
    "persimmon": Family("PersimmonConfig", _without("num_key_value_heads", _two())),
    "nemotron": Family("NemotronConfig", _two()),
    "arcee": Family("ArceeConfig", _two()),
    "seed_oss": Family("SeedOssConfig", _two(head_dim=16)),
    "apertus": Family("ApertusConfig", _two()),
    "ernie4_5": Family("Ernie4_5Config", _two(head_dim=16)),
    "hunyuan": Family("HunYuanDenseV1Config", _two(head_dim=16)),
    "bitnet": Family("BitNetConfig", _two()),
    "doge": Family("DogeConfig", _two()),
    "ministral3": Family("Ministral3Config", _two(head_dim=16)),
    "minicpm3": Family("MiniCPM3Config", {**_THREE, **_MLA}),
    "starcoder2": Family("Starcoder2Config", _two(sliding_window=None)),
    "mistral_no_window": Family("MistralConfig", _two(sliding_window=None)),
}
_POSITION_TABLES = {  # learned positions, or rotary ones of the older kind
    "gpt2": Family("GPT2Config", _GPT),
    "gpt_bigcode": Family("GPTBigCodeConfig", _GPT2LIKE),
    "opt": Family("OPTConfig", {**_MHA, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gptj": Family("GPTJConfig", _GPT2LIKE | {"rotary_dim": 8}),
    "codegen": Family("CodeGenConfig", _GPT2LIKE | {"rotary_dim": 8}),
}
_WINDOWS = {
    "qwen2_mix": Family("Qwen2Config", _two(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "mistral": Family("MistralConfig", {**_THREE, "sliding_window": 8}),
    "mistral_narrow": Family("MistralConfig", _two(sliding_window=3)),
    "ministral": Family("MinistralConfig", _two(sliding_window=8, layer_types=MIX, head_dim=16)),
    "mixtral_window": Family("MixtralConfig", _two(num_local_experts=4, num_experts_per_tok=2, sliding_window=8)),
    "gemma2": Family("Gemma2Config", {**_THREE, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma2_narrow": Family("Gemma2Config", _two(head_dim=16, sliding_window=3, query_pre_attn_scalar=16)),
    "gemma3": Family(
        "Gemma3TextConfig",
        {**_THREE, "head_dim": 16, "sliding_window": 8, "layer_types": [*MIX, MIX[0]], "query_pre_attn_scalar": 16},
    ),
    "gemma3n": Family("Gemma3nTextConfig", _GEMMA3N | {"num_kv_shared_layers": 0}),
    "gemma3n_shared_kv": Family("Gemma3nTextConfig", _GEMMA3N | {"num_kv_shared_layers": 2}),
    "gemma4": Family(  # whose layers differ in the number of their heads
        "Gemma4TextConfig",
        _GEMMA4 | {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_shared_kv": Family("Gemma4TextConfig", _GEMMA4 | {"num_kv_shared_layers": 2}),
    "phi3_window": Family("Phi3Config", _two(sliding_window=8)),
    "olmo3": Family("Olmo3Config", _two(sliding_window=8, layer_types=MIX)),
    "starcoder2_window": Family("Starcoder2Config", _two(sliding_window=8)),
    "cohere2": Family("Cohere2Config", _two(sliding_window=8, layer_types=MIX, logit_scale=0.5)),
    "exaone4": Family("Exaone4Config", _two(sliding_window=8, layer_types=MIX)),
    "gpt_oss": Family(
        "GptOssConfig",
        _two(head_dim=16, sliding_window=8, layer_types=MIX, num_local_experts=4, num_experts_per_tok=2),
    ),
    "llama4": Family(
        "Llama4TextConfig",
        {**_THREE, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"attention_chunk_size": 8, "interleave_moe_layer_step": 2}
        | {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
    ),
}
_HEADS = {  # more than a matrix, a scale and a cap makes logits of the last hidden state
    "modernbert_decoder": Family(
        "ModernBertDecoderConfig",
        _without("num_key_value_heads", _two(local_attention=16, layer_types=MIX))
        | {"cls_token_id": 1, "sep_token_id": 2},
    ),
    "rembert": Family(
        "RemBertConfig",
        _MHA | {"is_decoder": True, "input_embedding_size": 32, "output_embedding_size": 48, "num_hidden_layers": 2},
    ),
}
_EXPERTS = {
    "mixtral": Family("MixtralConfig", _two(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "phimoe": Family("PhimoeConfig", _two(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        _two(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig", _two(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
    ),
    "olmoe": Family("OlmoeConfig", _two(num_experts=4, num_experts_per_tok=2)),
    "flex_olmo": Family("FlexOlmoConfig", _two(num_experts=4, num_experts_per_tok=2)),
    "granite_moe": Family("GraniteMoeConfig", _two(num_local_experts=4, num_experts_per_tok=2, logits_scaling=2.0)),
    "hunyuan_moe": Family("HunYuanMoEV1Config", _two(head_dim=16, num_experts=4, moe_topk=2)),
    "minimax_m2": Family(
        "MiniMaxM2Config", _two(head_dim=16, num_local_experts=4, num_experts_per_tok=2, rotary_dim=8)
    ),
    "glm4_moe": Family("Glm4MoeConfig", _two(head_dim=16, **_ROUTED)),
    "glm4_moe_lite": Family("Glm4MoeLiteConfig", _two(**_MLA, **_ROUTED)),
    "deepseek_v2": Family("DeepseekV2Config", _DEEPSEEK),
    "deepseek_v3": Family("DeepseekV3Config", _DEEPSEEK),
    "deepseek_v32": Family("DeepseekV32Config", _DEEPSEEK | _INDEXER | {"index_topk": 64}),
    "deepseek_v32_sparse": Family("DeepseekV32Config", _DEEPSEEK | _INDEXER | {"index_topk": 24}),
    "longcat_flash": Family(
        "LongcatFlashConfig",
        _without("num_hidden_layers", _two(**_MLA, num_layers=2, ffn_hidden_size=96, head_dim=8, n_routed_experts=4))
        | {"zero_expert_num": 1, "expert_ffn_hidden_size": 32, "moe_topk": 2},
    ),
}
_CHAINS = {  # where a token stands follows from its slot in the cache, or an index keeps it beside the states
    "bloom": Family(
        "BloomConfig", _IDS | {"hidden_size": 64, "n_layer": 3, "n_head": 4, "tie_word_embeddings": False}, "paths"
    ),
    "gpt_neo": Family(
        "GPTNeoConfig",
        _IDS
        | {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "window_size": 8, "max_position_embeddings": 256}
        | {"attention_types": [[["global", "local"], 2]]},
        "paths",
    ),
    "mpt": Family(
        "MptConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256, "use_cache": True},
        "paths",
    ),
    "falcon_alibi": Family("FalconConfig", {**_MHA, "alibi": True}, "paths"),
    "qwen4_exp": Family(
        "Qwen4ExpTextConfig",
        _two(**_DELTA, num_experts=4, **_FEW_EXPERTS, shared_expert_intermediate_size=32, hc_count=2, hc_lowrank=8)
        | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
        | {"indexer_budget": 8, "indexer_compress_ratio": 4},
        "chain" if _RENAMES_CACHES else "refused",
    ),
}
_RECURRENT = {
    "lfm2": Family("Lfm2Config", _two(layer_types=["conv", "full_attention"], conv_L_cache=3)),
    "lfm2_moe": Family(
        "Lfm2MoeConfig",
        _two(
            layer_types=["conv", "full_attention"], conv_L_cache=3, num_experts=4, num_dense_layers=1, **_FEW_EXPERTS
        ),
    ),
    "lfm3": Family("Lfm3Config", _two(num_hidden_layers=3, head_dim=16, layer_types=["conv", *MIX], sliding_window=8)),
    "qwen3_next": Family(
        "Qwen3NextConfig",
        _two(**_DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        | {"shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": Family("Qwen3_5TextConfig", _two(**_DELTA)),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeTextConfig",
        _two(**_DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        | {"shared_expert_intermediate_size": 32},
    ),
    "olmo_hybrid": Family("OlmoHybridConfig", _two(**_DELTA)),
    "nemotron_h": Family(
        "NemotronHConfig",
        _two(mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, n_groups=1, chunk_size=16, head_dim=16)
        | {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
    ),
    "kimi_linear": Family(
        "KimiLinearConfig",
        _two(**_MLA, layer_types=["linear_attention", "full_attention"], head_dim=16)
        | {"linear_num_heads": 4, "linear_head_dim": 16}
        | {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32},
    ),
    "zaya": Family(
        "ZayaConfig",
        _two(head_dim=16, num_experts=4, moe_intermediate_size=32, router_hidden_size=32)
        | {"layer_types": ["hybrid_sliding", "hybrid"], "sliding_window": 8},
    ),
    "jamba": Family(
        "JambaConfig",
        _two(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=2)
        | {"num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    "bamba": Family("BambaConfig", _two(**_MAMBA, attn_layer_indices=[1])),
    "granite_moe_hybrid": Family(
        "GraniteMoeHybridConfig",
        _two(**_MAMBA, layer_types=["mamba", "attention"], num_local_experts=0, shared_intermediate_size=64),
    ),
    "falcon_h1": Family(
        "FalconH1Config", _two(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=16)
    ),
    "zamba2": Family(
        "Zamba2Config",
        _two(mamba_d_state=8, mamba_headdim=16, n_mamba_heads=8, mamba_ngroups=1, chunk_size=16, num_mem_blocks=1)
        | {"layers_block_type": ["mamba", "hybrid"]},
    ),
    "lara_mini": Family(
        "LaraMiniConfig",
        _two(**_DELTA, num_experts=4, **_FEW_EXPERTS, shared_expert_intermediate_size=32, sliding_window=8)
        | {"num_hidden_layers": 3, "layer_types": ["linear_attention", *MIX]},
    ),
    "bailing_hybrid": Family(
        "BailingHybridConfig",
        _two(**_MLA, head_dim=16, layer_types=["linear_attention", "full_attention"], num_local_experts=4)
        | {**_FEW_EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0},
    ),
    "zamba": Family(
        "ZambaConfig",
        _two(attention_head_dim=32, num_key_value_heads=4, n_mamba_heads=2, mamba_d_state=8, mamba_dt_rank=4)
        | {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    ),
}
_RECURRENT_ALONE = {  # whose layers are all recurrent
    "mamba": Family(
        "MambaConfig",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        "tree" if _RENAMES_CACHES else "refused",
    ),
    "falcon_mamba": Family(
        "FalconMambaConfig",
        _IDS | {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
        "tree" if _RENAMES_CACHES else "refused",
    ),
    "mamba2": Family(
        "Mamba2Config",
        _IDS
        | {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1}
        | {"chunk_size": 16},
        "tree" if _RENAMES_CACHES else "refused",
    ),
}
_ELSEWHERE = {  # whose state is in their modules, or in layers of the cache that are not recurrent ones
    "rwkv": Family("RwkvConfig", _IDS | {"hidden_size": 64, "num_hidden_layers": 2, "context_length": 256}, "refused"),
    "deepseek_v4": Family(
        "DeepseekV4Config",
        _two(num_hidden_layers=3, num_key_value_heads=1, head_dim=16, q_lora_rank=32, n_routed_experts=4, hc_mult=2)
        | {**_FEW_EXPERTS, **_INDEXER, "index_topk": 8, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 8},
        "refused",
    ),
    "recurrent_gemma": Family(
        "RecurrentGemmaConfig", _two(num_hidden_layers=3, attention_window_size=16, lru_width=64), "refused"
    ),
}
_SINCE_OLDEST = ("lfm3", "lara_mini", "bailing_hybrid")  # in the lists above
NEWER: dict[str, Family] = {  # that the oldest supported Transformers has not
    "minimax_m3": Family(
        "MiniMaxM3VLTextConfig",
        {
            **_THREE,
            "head_dim": 16,
            "index_block_size": 16,
            "index_topk_blocks": 3,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "rotary_dim": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        },
    ),
}
_BERT = _without("num_key_value_heads", _two(is_decoder=True))
_BART = _IDS | {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
_BART |= {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "is_encoder_decoder": False}
BESIDE: dict[str, Family] = {  # each for the tests of one thing that no family of the matrix does
    "moshi": Family("MoshiConfig", _two(head_dim=16, sliding_window=8, ffn_dim=96)),  # leaves its window to the cache
    "inkling": Family(
        "InklingTextConfig",
        _without("tie_word_embeddings", _two(head_dim=16, num_hidden_layers=3, sliding_window_size=8, d_rel=8))
        | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "rel_extent": 16}
        | {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], **_FEW_EXPERTS, "n_routed_experts": 4}
        | {"unpadded_vocab_size": 90},
        "chain",
    ),
    "marian": Family("MarianConfig", _BART | {"max_position_embeddings": 256, "is_decoder": True}, "paths"),
    "roformer": Family("RoFormerConfig", _BERT | {"embedding_size": 32}, "paths" if _RENAMES_CACHES else "plain"),
    "git": Family(  # reads padding as text, and no drafts at all before Transformers 5.24
        "GitConfig",
        _MHA | {"vision_config": {"hidden_size": 48, "num_hidden_layers": 1}},
        "tree" if _RENAMES_CACHES else "refused",
    ),
    "mllama": Family(  # whose layer 1 rests without images
        "MllamaConfig",
        {"text_config": _two(num_hidden_layers=3, cross_attention_layers=[1])},
        "tree" if _RENAMES_CACHES else "plain",
    ),
    "prophetnet": Family(
        "ProphetNetConfig",
        _IDS
        | {"hidden_size": 64, "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 96}
        | {"num_encoder_layers": 2, "num_encoder_attention_heads": 4, "encoder_ffn_dim": 96, "is_decoder": True}
        | {"is_encoder_decoder": False, "max_position_embeddings": 256},
        "plain",
    ),
}
FAMILIES = (
    _DENSE | _POSITION_TABLES | _WINDOWS | _HEADS | _EXPERTS | _CHAINS | _RECURRENT | _RECURRENT_ALONE | _ELSEWHERE
)
for _name in _SINCE_OLDEST:
    if not hasattr(transformers, FAMILIES[_name].config):
        del FAMILIES[_name]
#: Those that are drafted for.
DRAFTED = [name for name, family in FAMILIES.items() if family.form not in {"plain", "refused"}]
#: Those of them that have recurrent layers.
RECURRENT = [name for name in (*_RECURRENT, *_RECURRENT_ALONE) if name in DRAFTED]
#: Those of these that have attention, too.
HYBRIDS = [name for name in _RECURRENT if name in DRAFTED]
#: Those whose drafts are chains.
CHAINS = [name for name, family in FAMILIES.items() if family.form == "chain"]
MIXERS = ("qwen3_5", "kimi_linear", "nemotron_h", "falcon_h1", "zaya", "jamba", "lfm2", *CHAINS)  # one of each kind

# One family of each way to attend. Tests of these are `unit`; the same tests of other families are of the lane `families`.
ONE_OF_EACH = {
    "llama": "to all of the text",
    "mistral": "to a window",
    "gemma3": "to a window in some layers",
    "llama4": "in chunks",
    "gpt2": "with learned positions",
    "deepseek_v3": "to latent keys and values",
    "bloom": "with positions taken from slots, so that a draft is read path by path",
    "lfm2": "beside convolutions, whose states are recurrent",
    "qwen3_5": "beside recurrent layers, which read a draft level by level",
    "mamba2": "not at all: all layers are recurrent",
    "rwkv": "not at all: its recurrent state is refused",
}
