"""Which models read packed rows right is asked of the model: those that do pass, those that would mix texts are refused."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from tests.tiny import make_target
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.training.features import TargetFeatures
from transformers_falcon_spec.training.packed_reading import check_reads_packed

PACKED = {
    "input_ids": torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0)),
    "attention_mask": torch.ones(2, 12, dtype=torch.long),
    "position_ids": torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]]),
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt_neox"])
def test_a_target_that_passes_reads_every_text_as_alone(family: str, implementation: str) -> None:
    target = make_target(family)
    target.set_attn_implementation(implementation)

    found = TargetFeatures(target, (-1,), 1).read(**PACKED)["features"]

    for row, length in ((0, 5), (1, 9)):
        for part in (slice(length), slice(length, 12)):
            with torch.no_grad():
                outputs = target(input_ids=PACKED["input_ids"][row : row + 1, part], output_hidden_states=True)
            torch.testing.assert_close(found[row, part], outputs.hidden_states[-1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba"])
def test_a_recurrent_target_is_refused(family: str) -> None:
    with pytest.raises(OptionError, match="keeps a recurrent state, which goes on from text to text"):
        TargetFeatures(make_target(family), (-1,), 1).read(**PACKED)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_a_target_that_would_mix_texts_is_refused(family: str) -> None:
    with pytest.raises(OptionError, match=r"Packing needs a model that reads several texts.*Leave out `--packing`"):
        TargetFeatures(make_target(family), (-1,), 1).read(**PACKED)


def test_a_target_whose_mask_forgets_boundaries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    create = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda **inputs: create(**{**inputs, "position_ids": None})
    )

    with pytest.raises(OptionError, match=r"is off by .* in what it says, and by .* told of no boundary"):
        TargetFeatures(make_target(), (-1,), 1).read(**PACKED)


def test_the_model_is_asked_once_and_left_as_it_is() -> None:
    model, calls = make_target().train(), []
    model.register_forward_hook(lambda *_: calls.append(model.training))
    before = torch.get_rng_state()

    for _ in range(3):
        check_reads_packed(model, model, 2)
    num_calls = len(calls)
    check_reads_packed(model, model, 1)  # other attention may take one row but not several

    assert model.training
    assert not any(calls)
    assert 0 < num_calls < len(calls)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failure_is_told_in_words() -> None:
    model: Any = make_target()

    def broken(*_: Any, **__: Any) -> PreTrainedModel:
        raise RuntimeError("no such kernel")

    model.forward = broken
    with pytest.raises(OptionError, match="but `LlamaForCausalLM` fails: no such kernel"):
        check_reads_packed(model, model, 2)
