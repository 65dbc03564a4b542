"""The fingerprint of targets whose weights cannot be read."""

import pytest
import torch

from tests.tiny import make_target
from transformers_falcon_spec.drafters.compatibility.fingerprint import PACKED, TargetFingerprint


@pytest.mark.filterwarnings("ignore")  # torch says that this way of quantising grows old
def test_layers_whose_weight_is_a_function_are_told_of_as_quantised() -> None:
    target = make_target("llama")
    kinds = {torch.nn.Linear, torch.nn.Embedding}
    mapping = {
        torch.nn.Linear: torch.ao.quantization.default_dynamic_qconfig,
        torch.nn.Embedding: torch.ao.quantization.float_qparams_weight_only_qconfig,
    }
    packed = torch.ao.quantization.quantize_dynamic(target, mapping)
    assert not any(type(part) in kinds for part in packed.modules())

    found = TargetFingerprint.of_target(packed)

    assert found.quantization == "in place"
    assert found.skipped == {"embeddings": PACKED, "head": PACKED, "layers": "there are none"}
    assert found.weights == {}
