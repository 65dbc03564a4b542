"""Public masked diffusion models of random weights, with the names and fields that their software writes, and targets of their tokens."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.drafters.tokenizers import make_tokenizer
from tests.families import VOCAB_SIZE
from tests.tiny import make_target

from .foreign import SIZES, layer_shapes, randoms, written

START, MASK, SIZE = (
    VOCAB_SIZE,
    VOCAB_SIZE + 1,
    VOCAB_SIZE + 3,
)  # Dream adds two tokens behind Qwen's; tables are larger
SPECIAL = {"<|beginoftext|>": START, "<|mask|>": MASK}
STACK = {**SIZES, "num_hidden_layers": 2, "vocab_size": SIZE, "tie_word_embeddings": False}
CODE = "from pathlib import Path\nPath(__file__).with_name('was_run').touch()\n"

Parts = tuple[dict[str, Any], dict[str, Tensor]]


def stack(config: dict[str, Any], qkv_bias: bool, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a whole Llama-like model under their usual names; the head is left out where it is the embeddings."""
    hidden, shapes = (
        config["hidden_size"],
        {"model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"])},
    )
    for index in range(config["num_hidden_layers"]):
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= layer_shapes(f"model.layers.{index}", config, norms, qkv_bias=qkv_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return randoms(shapes, seed)


def dream(**fields: Any) -> Parts:
    """Config and weights of Dream."""
    config = {
        **STACK,
        "model_type": "Dream",
        "architectures": ["DreamModel"],
        "auto_map": {"AutoModel": "modeling_dream.DreamModel", "AutoConfig": "modeling_dream.DreamConfig"},
        "mask_token_id": MASK,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 28,
        **fields,
    }
    return config, stack(config, qkv_bias=True)


def fast_dllm(**fields: Any) -> Parts:
    """Config and weights of Fast-dLLM v2, with blocks of 4 instead of 32; the config names no mask."""
    kind = {"model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"], "bd_size": 4}
    config = {**STACK, **kind, "rope_theta": 1e6, "tie_word_embeddings": True, "layer_types": ["full_attention"] * 2}
    config |= {"conplemenrary_mask": True, "use_sliding_window": False, "sliding_window": None, **fields}
    return config, stack(config, qkv_bias=True)


def a2d(stock: str, **fields: Any) -> Parts:
    """Config and weights of an A2D conversion of a stock model; the config names no mask."""
    kind = {"model_type": f"a2d-{stock}", "architectures": [f"A2D{stock.title()}LMHeadModel"]}
    config = {**STACK, **kind, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, **fields}
    if stock == "qwen3":
        config["head_dim"] = 24
    weights = stack(config, qkv_bias=stock == "qwen2")
    if stock == "qwen3":
        names = [f"model.layers.{index}.self_attn.{part}_norm.weight" for index in range(2) for part in "qk"]
        weights |= randoms(dict.fromkeys(names, (config["head_dim"],)), seed=1)
    return config, weights


def diffullama(**fields: Any) -> Parts:
    """Config and weights of DiffuLLaMA, which are Llama's; the tokenizer alone names the mask."""
    config = {**STACK, "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, **fields}
    return config, stack(config, qkv_bias=False)


def saved(folder: Path, parts: Parts, tokens: int = VOCAB_SIZE, mask: str | None = "<|mask|>", **special: int) -> Path:
    """The folder of a diffusion model: weights, tokenizer, and code that leaves a trace where it is run."""
    written(folder, *parts, "model.safetensors")
    make_tokenizer(tokens, mask, **(special or SPECIAL)).save_pretrained(folder)
    tokenizer = folder / "tokenizer_config.json"
    fields = json.loads(tokenizer.read_text()) | {"tokenizer_class": "DreamTokenizer"}
    fields["auto_map"] = {"AutoTokenizer": ["modeling_dream.DreamTokenizer", None]}
    tokenizer.write_text(json.dumps(fields))
    (folder / "modeling_dream.py").write_text(CODE)
    return folder


def saved_target(folder: Path, family: str = "qwen2", tokens: int = VOCAB_SIZE, **changes: Any) -> Any:
    """A target in double precision that was loaded with its tokenizer beside it."""
    make_target(family, **changes).save_pretrained(folder)
    make_tokenizer(tokens).save_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    return target


def copied(target: Any, parts: Parts, name: str = "{}") -> Parts:
    """The parts with the weights of a target, as far as they are those of its tokens; `name` says how they are called."""
    config, weights = parts
    for key, value in target.state_dict().items():
        ours = weights.get(name.format(key))
        if ours is not None:
            ours[: len(value)] = value.to(ours.dtype)
    return config, weights
