"""An inflated DFlash drafter drafts what the small one does, through stock `generate` and in this package's loop."""

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantRMSNorm

from benchmarks.inflation import Shape, inflate, inflate_drafter
from tests import runs
from tests.benchmarks.inflation.test_models import NEW_IDS, WIDER
from tests.drafters.dflash.makers import from_stock
from tests.drafters.dflash.test_stock import peaked_dflash
from tests.tiny import VOCAB_SIZE, make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.drafters.dflash import context_layers

SHAPES = {"wider": WIDER, "new ids": NEW_IDS}


def _norms_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock RMSNorm computes in float32, whatever it is given."""

    def forward(norm: Any, states: torch.Tensor) -> torch.Tensor:
        return norm.weight * states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

    for norm in (LlamaRMSNorm, MuseGlimmerAssistantRMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


def _pair(shape: Shape) -> tuple[Any, Any, Any, Any]:
    """A small pair whose norms matter, and the large one."""
    target = make_target(num_hidden_layers=5).double()
    drafter = peaked_dflash(target, target_layer_ids=[0, 2], rms_norm_eps=1e-2)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "norm" in name:
                weight.mul_(1 + torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)))
    return target, drafter, inflate(target, shape), inflate_drafter(drafter, target, shape)


@torch.no_grad()
def _logits(target: Any, drafter: Any) -> torch.Tensor:
    """What the drafter says of the tokens behind a text."""
    ids = make_prompt(20)
    states = target(ids, output_hidden_states=True).hidden_states
    context = torch.cat([states[layer] for layer in context_layers(drafter)], dim=-1)
    block = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    block[0, 0] = ids[0, -1]
    return target.lm_head(drafter(target.get_input_embeddings()(block), context).last_hidden_state)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_inflated_drafter_has_the_logits_of_the_small_one(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    _norms_in_double(monkeypatch)
    target, drafter, large_target, large = _pair(shape)

    expected, found = _logits(target, drafter), _logits(large_target, large)

    torch.testing.assert_close(found[..., :VOCAB_SIZE], expected, rtol=1e-10, atol=1e-10)
    assert expected.std() > 0.01
    assert shape is WIDER or found[..., VOCAB_SIZE:].max() < -1e4


def test_stock_generate_keeps_as_much_of_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    _norms_in_double(monkeypatch)
    *small, large_target, large = _pair(NEW_IDS)
    outcomes = []
    for target, drafter in (small, (large_target, large)):
        reads: list[Any] = []
        drafts: list[Any] = []
        target.register_forward_hook(lambda *_, into=reads: into.append(1))
        drafter.register_forward_hook(lambda *_, into=drafts: into.append(1))
        written = runs.plain(target, assistant_model=drafter, speculation_type="dflash", max_new_tokens=24).sequences
        outcomes.append((written.tolist(), len(reads), len(drafts)))

    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] > 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_its_trees_in_this_packages_loop_are_those_of_the_small_one(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    _norms_in_double(monkeypatch)
    target, stock, large_target, _ = _pair(shape)
    drafter = from_stock(stock, target)
    drafter.generation_config = SpeculationConfig(tune=False)
    large = inflate_drafter(drafter, target, shape)

    small, wide = (runs.drafted(*pair) for pair in ((target, drafter), (large_target, large)))

    assert wide.sequences.tolist() == small.sequences.tolist()
    for name in ("num_steps", "num_drafted", "num_accepted"):
        assert getattr(wide.speculation, name) == getattr(small.speculation, name)
    assert small.speculation.num_drafted > 0
