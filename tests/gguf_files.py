"""Writes a tiny Llama and its tokenizer as a GGUF file, as llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import PreTrainedModel

from tests.chat import make_tokenizer

KIND = "llama"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}
Q8 = gguf.GGMLQuantizationType.Q8_0
ROW = 32  # weights in a block of this kind


def round_to_q8(target: PreTrainedModel) -> None:
    """Give matrices of `target` the values that they have after being written in eight bits and read."""
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() == 2 and weight.shape[1] % ROW == 0:
                packed = gguf.quantize(weight.float().numpy(), Q8)
                weight.copy_(torch.from_numpy(gguf.dequantize(packed, Q8)))


def write_gguf(target: PreTrainedModel, file: Path, kind: str = KIND) -> None:
    """Write a Llama whose matrices were rounded by [`round_to_q8`], and a tokenizer, as a model of `kind`."""
    writer = gguf.GGUFWriter(file, kind)
    _describe(writer, target.config)
    for name, weight in target.state_dict().items():
        values = weight.float().numpy()
        for part, heads in (
            ("q_proj", target.config.num_attention_heads),
            ("k_proj", target.config.num_key_value_heads),
        ):
            if part in name:  # llama.cpp turns pairs of neighbours, Transformers halves
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        written = name
        for theirs, ours in NAMES.items():
            written = written.replace(theirs, ours)
        if values.ndim == 2 and values.shape[1] % ROW == 0:
            writer.add_tensor(written, gguf.quantize(values, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(written, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    """The sizes and the tokenizer."""
    writer.add_name("A title")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)

    tokenizer = make_tokenizer()
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens += [f"<unused {number}>" for number in range(len(tokens), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token.replace(" ", "Ġ") for token in tokens])
    writer.add_token_merges([" ".join(part.replace(" ", "Ġ") for part in pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
