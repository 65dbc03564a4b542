"""Tiny targets with quantised weights, by way of torchao, bitsandbytes and GPTQModel, which `make test-with EXTRA=quantized` installs."""

import logging
import tempfile
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from tests.tiny import make_target

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CONFIGS: dict[str, dict[str, Any]] = {  # of bitsandbytes
    "nf4": FOUR_BITS,
    "fp4": {**FOUR_BITS, "bnb_4bit_quant_type": "fp4"},
    "nf4, scales quantised too": {**FOUR_BITS, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
KERNELS = {"gptq": "gptq_torch", "awq": "torch_awq"}  # of GPTQModel, those that run on every device
BLOCKS = {"hidden_size": 64, "intermediate_size": 128}  # layers of whole blocks of 64 weights, as its CPU kernels need
GROUP_SIZE = 32  # weights that share a scale, where a checkpoint is packed


def loaded(kind: str, device: str = "cpu", **options: Any) -> PreTrainedModel:
    """A target that is quantised, or was before it is loaded; its text has no end, as that of the tiny ones."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # it tells every cast to float16
    loading: dict[str, Any] = {"device_map": device}
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig  # noqa: PLC0415  only this lane has it

        loading["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    elif kind in CONFIGS:
        loading["quantization_config"] = BitsAndBytesConfig(**CONFIGS[kind])
        options = {**options, **BLOCKS}

    with tempfile.TemporaryDirectory() as folder:
        if kind in KERNELS:
            save_packed(kind, folder, **options, **BLOCKS)
        else:
            make_target(**options).save_pretrained(folder)
        with mock.patch("torch.compile", lambda function, **_: function):  # which GPTQModel does, for minutes
            target = AutoModelForCausalLM.from_pretrained(folder, **loading).eval()

    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    return target


def save_packed(method: str, folder: str, **options: Any) -> None:
    """Save a target of random weights of 4 bits, eight of them in one number, as GPTQ or AWQ leave them."""
    target = make_target(**options)
    weights = target.state_dict()
    generator = torch.Generator().manual_seed(0)

    for name in [name for name in weights if name.endswith("_proj.weight")]:
        num_out, num_in = weights.pop(name).shape
        num_groups = num_in // GROUP_SIZE
        shape = (num_in // 8, num_out) if method == "gptq" else (num_in, num_out // 8)
        parts = {
            "qweight": torch.randint(-(2**31), 2**31, shape, generator=generator).int(),
            "qzeros": torch.full((num_groups, num_out // 8), 0x77777777, dtype=torch.int32),
            "scales": torch.full((num_groups, num_out), 0.05),
        }
        if method == "gptq":
            parts["g_idx"] = (torch.arange(num_in) // GROUP_SIZE).int()  # the group of each input
        weights.update({name.replace("weight", part): value for part, value in parts.items()})

    target.config.quantization_config = {
        "quant_method": method,
        "backend": KERNELS[method],
        "bits": 4,
        "group_size": GROUP_SIZE,
        "desc_act": False,
    }
    target.save_pretrained(folder, state_dict=weights)
