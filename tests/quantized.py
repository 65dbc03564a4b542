"""Tiny targets with quantised weights, by way of torchao and bitsandbytes, which the extra `quantized` brings."""

import logging
import tempfile
from typing import Any

from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from tests.tiny import make_target

FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CONFIGS: dict[str, dict[str, Any]] = {  # of bitsandbytes
    "nf4": FOUR_BITS,
    "fp4": {**FOUR_BITS, "bnb_4bit_quant_type": "fp4"},
    "nf4, scales quantised too": {**FOUR_BITS, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
BLOCKS = {"hidden_size": 64, "intermediate_size": 128}  # layers of whole blocks of 64 weights, as its CPU kernels need


def loaded(kind: str, device: str = "cpu", **options: Any) -> PreTrainedModel:
    """A target that is quantised while it loads; its text has no end, as that of the tiny ones."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # it tells every cast to float16
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig  # noqa: PLC0415  only this lane has it

        config: Any = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        config = BitsAndBytesConfig(**CONFIGS[kind])
        options = {**options, **BLOCKS}
    with tempfile.TemporaryDirectory() as folder:
        make_target(**options).save_pretrained(folder)
        target = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=device).eval()
    target.generation_config.eos_token_id, target.generation_config.pad_token_id = None, 0
    return target
