"""Models that read packed texts as they read each alone pass; models that would mix texts are refused."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from tests.tiny import make_target
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.training.features import TargetFeatures
from transformers_falcon_spec.training.packing import packed_inputs
from transformers_falcon_spec.transformers_versions import INSTALLED

SDPA = ("llama", "qwen3", "mistral", "gemma3", "phi3", "gpt_neox")
FALCON = ("falcon", "falcon_alibi")
FALCON_FINDS_TEXTS = INSTALLED >= (5, 24)  # it did not read positions before
PACKED = {
    "input_ids": torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0)),
    "attention_mask": torch.ones(2, 12, dtype=torch.long),
    "position_ids": torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]]),
}


def assert_read_as_alone(target: PreTrainedModel) -> None:
    """Features of every text of the packed rows are those of the text alone."""
    found = TargetFeatures(target, (-1,), 1).read(**PACKED)["features"]

    for row, length in ((0, 5), (1, 9)):
        for part in (slice(length), slice(length, 12)):
            with torch.no_grad():
                outputs = target(input_ids=PACKED["input_ids"][row : row + 1, part], output_hidden_states=True)
            torch.testing.assert_close(found[row, part], outputs.hidden_states[-1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *((family, "eager") for family in FALCON if FALCON_FINDS_TEXTS),
        *((family, "sdpa") for family in SDPA),
        *((family, "eager") for family in (*SDPA, "gemma2", "gpt2")),
    ],
)
def test_a_target_that_passes_reads_every_text_as_alone(family: str, implementation: str) -> None:
    target = make_target(family)
    target.set_attn_implementation(implementation)

    assert_read_as_alone(target)


@pytest.mark.parametrize("family", ["gpt_oss", "opt", "mpt", *(["falcon"] if not FALCON_FINDS_TEXTS else [])])
def test_a_target_that_finds_no_text_in_positions_is_given_masks(family: str) -> None:
    target = make_target(family)

    inputs = packed_inputs(target, target.get_decoder(), PACKED["position_ids"])

    assert "attention_mask" in inputs
    assert_read_as_alone(target)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "llama4", "mistral_narrow"])
def test_masks_end_with_windows_chunks_and_texts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers_falcon_spec.training.packing._find_boundaries", lambda *_: "masks")

    assert_read_as_alone(make_target(family))


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba"])
def test_a_recurrent_target_is_refused(family: str) -> None:
    with pytest.raises(OptionError, match="keeps a recurrent state, which goes on from text to text"):
        TargetFeatures(make_target(family), (-1,), 1).read(**PACKED)


@pytest.mark.parametrize("family", ["bloom", "lfm2", *(["falcon_alibi"] if not FALCON_FINDS_TEXTS else [])])
def test_a_target_that_would_mix_texts_is_refused(family: str) -> None:
    with pytest.raises(
        OptionError, match=r"Packing needs a model.*with positions it is off by.*masks.*Leave out `--packing`"
    ):
        TargetFeatures(make_target(family), (-1,), 1).read(**PACKED)


def test_attention_that_forgets_boundaries_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    create = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama,
        "create_causal_mask",
        lambda **inputs: create(**{**inputs, "position_ids": None, "attention_mask": None}),
    )

    with pytest.raises(
        OptionError,
        match=r"does not \(sdpa, 2 rows; with positions it is off .*; with masks it is off .* without\)",
    ):
        TargetFeatures(make_target(), (-1,), 1).read(**PACKED)


def test_the_model_is_asked_once_and_left_as_it_is() -> None:
    model, calls, positions = make_target().train(), [], PACKED["position_ids"]
    model.register_forward_hook(lambda *_: calls.append(model.training))
    before = torch.get_rng_state()

    for _ in range(3):
        packed_inputs(model, model, positions)
    num_calls = len(calls)
    packed_inputs(model, model, positions[:1])  # attention may take one row but not several

    assert model.training
    assert not any(calls)
    assert 0 < num_calls < len(calls)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failure_is_explained() -> None:
    model: Any = make_target()

    def broken(*_: Any, **__: Any) -> PreTrainedModel:
        raise RuntimeError("no such kernel")

    model.forward = broken
    with pytest.raises(OptionError, match="with positions it fails: no such kernel"):
        packed_inputs(model, model, PACKED["position_ids"])
