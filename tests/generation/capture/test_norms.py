"""Fused norms give the numbers of stock ones, and take their place in a copy alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.tiny import make_prompt, make_target
from transformers_falcon_spec.generation.capture import norms
from transformers_falcon_spec.generation.capture.norms import FusedNorm, as_captured, fits, with_fused_norms

TYPES = (torch.float32, torch.bfloat16, torch.float16)


class TwiceOff(LlamaRMSNorm):
    """A norm that is Llama's as long as its weight is what it starts with."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * self.weight


class OneEpsilon(LlamaRMSNorm):
    """A norm that leaves its setting out."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.weight * functional.rms_norm(hidden_states, self.weight.shape, None, 1e-6)


class Doubled(LlamaRMSNorm):
    """A norm in the caller's code."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_FITS", {})


def _learned(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> Any:
    """The model with fused norms, as work that is captured warms up with it."""
    monkeypatch.setattr(norms, "is_capturing", lambda: True)
    return as_captured(model)


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@torch.no_grad()
def test_a_fused_norm_gives_the_numbers_of_the_stock_one(kind: Any, weight_type: torch.dtype) -> None:
    for shape, epsilon in [((1, 5, 16), 1e-6), ((2, 3, 4, 128), 1e-5), ((3, 1), 1e-6), ((7, 300), 1e-2)]:
        norm = kind(shape[-1], epsilon)
        norm.weight.copy_(torch.randn(shape[-1]))
        norm = norm.to(weight_type)
        assert fits(norm)
        for states_type in TYPES:
            for size in (1e-4, 1.0, 100.0):
                states = (size * torch.randn(shape)).to(states_type)
                torch.testing.assert_close(FusedNorm(norm)(states), norm(states), rtol=norms._SAME, atol=0)


@pytest.mark.parametrize("kind", [Gemma2RMSNorm, GptOssRMSNorm, Olmo2RMSNorm, T5LayerNorm, TwiceOff])
@pytest.mark.parametrize("weight_type", TYPES)
@torch.no_grad()
def test_a_form_that_is_another_one_does_not_fit(kind: Any, weight_type: torch.dtype) -> None:
    norm = kind(32).to(weight_type)
    norm.variance_epsilon = 1e-6

    assert not fits(norm)


@torch.no_grad()
def test_an_epsilon_that_is_not_the_one_in_use_does_not_fit() -> None:
    assert fits(OneEpsilon(32, eps=1e-6))
    assert not fits(OneEpsilon(32, eps=1e-5))


def test_only_stock_norms_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    with_forward, hooked = LlamaRMSNorm(8), LlamaRMSNorm(8)
    with_forward.forward = with_forward.forward
    hooked.register_forward_hook(lambda _module, _args, output: output + 1)
    others = [
        Gemma2RMSNorm(8),
        Olmo2RMSNorm(8),
        MambaRMSNormGated(8, 8),
        T5LayerNorm(8),
        nn.RMSNorm(8),
        nn.LayerNorm(8),
    ]
    others += [Doubled(8), with_forward, LlamaRMSNorm(8).double(), nn.Linear(8, 8), nn.ReLU()]
    model = nn.Sequential(*others, hooked)
    model.device = torch.device("cpu")

    found = _learned(monkeypatch, model)

    assert list(found)[:-1] == others
    assert type(found[-1]) is FusedNorm
    assert found[-1](torch.ones(8)).tolist() == hooked(torch.ones(8)).tolist()


@pytest.mark.parametrize(("family", "num"), [("llama", 2), ("qwen3", 4), ("phi3", 2), ("gemma2", 0), ("opt", 0)])
@pytest.mark.parametrize("dtype", TYPES[:2])
@torch.no_grad()
def test_a_target_with_fused_norms_shares_all_but_them(
    family: str, num: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = make_target(family).to(dtype), make_prompt()
    before = {part: (type(part), {**vars(part)}, {**part._modules}) for part in target.modules()}

    found = _learned(monkeypatch, target)
    expected, logits = target(prompt).logits, found(prompt).logits
    parts = [type(part) for part in found.modules()]

    assert logits.equal(expected)
    assert {part: (type(part), vars(part), part._modules) for part in target.modules()} == before
    assert parts.count(FusedNorm) == (num * target.config.num_hidden_layers + 1 if num else 0)
    assert [id(weight) for weight in found.parameters()] == [id(weight) for weight in target.parameters()]
    for weight in target.parameters():
        weight.mul_(1.5)  # which the copy has to see
    assert found(prompt).logits.equal(target(prompt).logits)


@torch.no_grad()
def test_norms_stay_where_they_were_not_tried_and_outside_of_captured_work() -> None:
    target = make_target()

    assert with_fused_norms(target) is target
    assert as_captured(target) is target
    assert not norms._FITS
