"""Targets with an MTP layer in their checkpoint, tiny and of random weights, under the names that publishers give them."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.families import FAMILIES, VOCAB_SIZE
from tests.tiny import in_double, peaked

WINDOW = 8
MELLUM = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 64}
MELLUM |= {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MELLUM |= {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MELLUM |= {"max_position_embeddings": 256, "sliding_window": WINDOW, "num_mtp_layers": 1}
MELLUM |= {"layer_types": ["sliding_attention", "full_attention"]}
BEHIND = {  # layers behind the last one of the model
    "layers.0.post_norm.": "model.layers.2.shared_head.norm.",
    "layers.0.mtp_block.": "model.layers.2.",
    "layers.0.": "model.layers.2.",
}
APART = {
    "layers.0.eh_proj.": "mtp.fc.",
    "layers.0.enorm.": "mtp.pre_fc_norm_embedding.",
    "layers.0.hnorm.": "mtp.pre_fc_norm_hidden.",
    "layers.0.post_norm.": "mtp.norm.",
    "layers.0.mtp_block.": "mtp.layers.0.",
}
# By kind: the class of its configuration, its fields, and how its publisher's names begin, by Transformers'.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "mellum": ("MellumConfig", MELLUM, APART),
    "glm4_moe": ("Glm4MoeConfig", FAMILIES["glm4_moe"].fields, BEHIND),
    "deepseek_v3": ("DeepseekV3Config", FAMILIES["deepseek_v3"].fields, BEHIND),
    "qwen3_5": ("Qwen3_5TextConfig", {**FAMILIES["qwen3_5"].fields, "mtp_num_hidden_layers": 1}, APART),
    "qwen3_next": ("Qwen3NextConfig", FAMILIES["qwen3_next"].fields, APART),  # whose config counts no layers
}
HYBRIDS = ("qwen3_5", "qwen3_next")  # which are not captured, and which stock `use_mtp` refuses
OTHERS = [kind for kind in KINDS if kind not in HYBRIDS]


def saved(folder: Path, kind: str, **changes: Any) -> Path:
    """The folder of a target and its MTP layer; `changes` go to its config."""
    name, fields, names = KINDS[kind]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        target = peaked(AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**fields, **changes})))
        target.save_pretrained(folder)
        target.config = config_of_stock(target.config)
        layers = MtpModel(target, 1).layers
        for weight in layers.parameters():
            weight.copy_(torch.randn_like(weight) * (weight.shape[-1] ** -0.5 * 2) + (weight.dim() == 1))
    weights = load_file(folder / "model.safetensors")
    for key, value in layers.state_dict(prefix="layers.").items():
        begins = next(each for each in names if key.startswith(each))
        weights |= _published(names[begins] + key.removeprefix(begins), value)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _published(name: str, value: Tensor) -> dict[str, Tensor]:
    """A weight as publishers have it: each expert by itself, its gate apart from what it gates."""
    layer, is_of_experts, part = name.rpartition(".experts.")
    if not is_of_experts:
        return {name: value}

    found = {}
    for number, expert in enumerate(value):
        halves = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
        parts = dict(halves) if part == "gate_up_proj" else {part: expert}
        for each, weight in parts.items():
            found[f"{layer}.experts.{number}.{each}.weight"] = weight.clone()
    return found


def config_of_stock(config: Any) -> Any:
    """A config that says of its MTP layer what Transformers asks for; those of hybrids do not."""
    config = copy.deepcopy(config)
    config.num_mtp_layers = 1
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        config.mtp_layer_types = ["full_attention"]
    return config


def loaded(folder: Path) -> PreTrainedModel:
    """The target of a folder in double precision, which takes a layer behind its second one for its MTP layer."""
    target = in_double(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval())
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    target._keys_to_ignore_on_load_unexpected = [*target._keys_to_ignore_on_load_unexpected, r"model\.layers\.2\..*"]
    return target
