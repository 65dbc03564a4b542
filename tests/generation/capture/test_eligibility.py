"""By what weights are quantised decides whether their forwards may be captured."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import BitsAndBytesConfig, FineGrainedFP8Config, GPTQConfig

from transformers_falcon_spec.generation.capture.eligibility import how_quantised, why_not_repeated


class Int4WeightOnlyConfig:
    """Has the name of one of torchao's configurations."""


class Int8WeightOnlyConfig:
    """Has the name of another one."""


TORCHAO = {kind: SimpleNamespace(quant_type=kind()) for kind in (Int4WeightOnlyConfig, Int8WeightOnlyConfig)}


@pytest.mark.parametrize(
    ("config", "how", "may_be_captured"),
    [
        (BitsAndBytesConfig(load_in_4bit=True), "bitsandbytes in 4 bits", True),
        (BitsAndBytesConfig(load_in_8bit=True), "BitsAndBytesConfig", False),
        (TORCHAO[Int8WeightOnlyConfig], "torchao's Int8WeightOnlyConfig", True),
        (TORCHAO[Int4WeightOnlyConfig], "torchao's Int4WeightOnlyConfig", False),
        (GPTQConfig(bits=4), "GPTQConfig", False),
        (FineGrainedFP8Config(), "FineGrainedFP8Config", False),
        (FineGrainedFP8Config(dequantize=True), None, True),
    ],
)
def test_weights_whose_forwards_were_never_captured_are_named(
    config: Any, how: str | None, may_be_captured: bool
) -> None:
    model = nn.Linear(2, 2)
    model.hf_quantizer = SimpleNamespace(quantization_config=config)
    reason = f"the target's weights are quantised by {how}, whose forwards were never captured"

    assert how_quantised(model) == how
    assert why_not_repeated(model, "target") == (None if may_be_captured else reason)


@pytest.mark.parametrize(("packed", "how"), [({}, None), ({"lm_head": nn.Linear(2, 2)}, "SimpleNamespace")])
def test_a_gguf_file_whose_blocks_were_all_unpacked_has_plain_weights(packed: Any, how: str | None) -> None:
    model = nn.Linear(2, 2)
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(dequantize=False), packed_modules=packed)

    assert how_quantised(model) == how


@pytest.mark.parametrize(("kernel", "may_be_captured"), [("TorchLinear", True), ("MarlinLinear", False)])
def test_weights_that_gptqmodel_reads_are_named_by_its_kernel(kernel: str, may_be_captured: bool) -> None:
    layer = type(kernel, (nn.Linear,), {"__module__": "gptqmodel.nn_modules.qlinear"})
    model = nn.Sequential(nn.Linear(2, 2), layer(2, 2), layer(2, 2))
    model.hf_quantizer = SimpleNamespace(quantization_config=GPTQConfig(bits=4))
    reason = f"the target's weights are quantised by GPTQModel's {kernel}, whose forwards were never captured"

    assert why_not_repeated(model, "target") == (None if may_be_captured else reason)


def test_a_model_without_a_quantizer_has_plain_weights() -> None:
    assert how_quantised(nn.Linear(2, 2)) is None
