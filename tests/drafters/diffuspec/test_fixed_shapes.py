"""Diffusion drafters in fixed shapes: drafts are those of the same drafter as ever, and its passes ask the host for nothing."""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.drafters.diffuspec.stand_ins import make_diffusion
from tests.drafters.tree_drafting.test_fixed import decode
from tests.drafters.tree_drafting.twins import MOST_KEPT, Twins, assert_same, to_meta
from tests.tape import install
from tests.tiny import make_target
from transformers_falcon_spec.drafters.diffuspec import drafter as drafter_file
from transformers_falcon_spec.drafters.diffuspec.denoising import DenoisedTexts
from transformers_falcon_spec.drafters.diffuspec.search import NgramProxy
from transformers_falcon_spec.generation.drafting import DraftBudget
from transformers_falcon_spec.generation.shapes import BUCKETS

KINDS: dict[str, dict[str, Any]] = {
    "the best path": {"with_proxy": True},
    "a mask's own row, a tree": {"logits_shift": 0, "search": "tree", "num_tree_nodes": 9},
    "three passes, adaptive": {"num_steps": 3, "draft_length": "adaptive", "growth": 2},
    "two passes, a mask's own row": {"num_steps": 2, "logits_shift": 0},
    "fewer tokens": {"draft_vocab_size": 90},
    "one token": {"num_draft_tokens": 1},
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make_pair(kind: str) -> tuple[Any, Any]:
    target, options = make_target().double(), dict(KINDS[kind])
    with_proxy = options.pop("with_proxy", False)
    drafter = make_diffusion(target, **options)
    if with_proxy:
        drafter.proxy = NgramProxy.fit([[5, 6, 7, 5, 6, 8, 9]], 3, target.config.vocab_size)
    return target, drafter


def make_twins(kind: str = "the best path", num_rows: int = 2, **options: Any) -> Twins:
    return Twins("", num_rows, pair=make_pair(kind), **options)


@pytest.mark.parametrize(("kind", "num_rows"), [*((kind, 3) for kind in KINDS), ("the best path", 1)])
def test_drafts_are_those_of_the_same_drafter_as_ever(kind: str, num_rows: int) -> None:
    decode(make_twins(kind, num_rows))


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_drafts_the_same_by_noise(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tapes = install(monkeypatch)
    twins = make_twins(kind, seed=5)

    decode(twins, temperature=0.7)

    assert len(tapes) == len(twins.buffers.repeated) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_asked_of_the_host(kind: str) -> None:
    twins = make_twins(kind)
    buffers, drafter = twins.buffers, twins.drafter.to("meta")
    to_meta(buffers, buffers.cache, *buffers.cache.layers)
    twins.noise = twins.noise.to("meta")
    budget = DraftBudget((100, 3), 512, temperature=0.7, noise=twins.noise_ahead)
    reports = []

    def denoise(drafter: Any, texts: Any, nums: Any, passes: Any) -> list[Any]:
        _, report = buffers._held("a draft")
        buffers._denoise(drafter, 256, passes, report)
        reports.append((report.device.type, [len(text) for text in texts]))
        return [SimpleNamespace() for _ in nums]

    buffers.lattices = denoise
    twins.fixed._denoised([2, 0], drafter.config.num_steps, budget)

    assert [device for device, _ in reports] == ["meta"]


def test_pauses_of_any_length_forget_nothing() -> None:
    twins = make_twins()

    for step in range(8):
        twins.give((MOST_KEPT - 1, step % 2), is_kept=step % 3 > 0)

    assert_same(*twins.drafts((100, 100)), 2)


def test_text_that_outgrows_the_buffers_goes_on_in_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_file, "BUCKETS", replace(BUCKETS, least_slots=16))
    twins = make_twins(num_slots=16)

    decode(twins, num_steps=12)

    assert twins.buffers.cache.capacity >= 64
    assert max(twins.buffers.num_read) > 32


def test_what_masks_leave_spoils_no_later_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    lattices = DenoisedTexts.lattices

    def overflowing(self: Any, *args: Any) -> Any:
        found = lattices(self, *args)
        behind = torch.arange(self.cache.capacity) - torch.tensor(self.num_read)[:, None]
        is_left = (behind >= 0) & (behind < self.most_positions)
        for layer in self.cache.layers:
            for states in layer.held.values():
                states.masked_fill_(is_left[:, None, :, None], torch.nan)
        return found

    monkeypatch.setattr(DenoisedTexts, "lattices", overflowing)

    decode(make_twins())


@pytest.mark.parametrize(
    "limits", [{"num_nodes": 4}, {"num_passes": 1}, {"is_chain": True}, {"num_passes": 2, "num_nodes": 3}]
)
@pytest.mark.parametrize("kind", ["three passes, adaptive", "a mask's own row, a tree"])
def test_the_budget_limits_fixed_drafts_alike(kind: str, limits: dict[str, Any]) -> None:
    twins = make_twins(kind)

    for _ in range(2):
        plain, drafted = twins.drafts((100, 100), **limits)
        assert_same(plain, drafted, 2)
        assert drafted.num_passes == plain.num_passes
        assert drafted.depth == plain.depth
        twins.give((2, 3))


def _temperature(drafter: Any) -> None:
    drafter.config.mass = 0.3


def _fewer_tokens(drafter: Any) -> None:
    drafter.config.num_draft_tokens = 2


@pytest.mark.parametrize("change", [None, _temperature, _fewer_tokens])
def test_a_later_call_goes_on_in_the_same_buffers_unless_the_drafter_changed(
    change: Callable[[Any], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    first = make_twins()
    decode(first, num_steps=2)
    if change is not None:
        change(first.drafter)

    second = Twins("", 2, seed=9, buffers=first.buffers, pair=(first.model, first.drafter))
    decode(second, num_steps=3)

    assert (second.buffers is first.buffers) == (change is None)


def test_buffers_hold_neither_drafter_nor_target() -> None:
    twins = make_twins(num_rows=1)
    decode(twins, num_steps=2)
    buffers, held = twins.buffers, [weakref.ref(twins.drafter), weakref.ref(twins.target)]

    del twins
    gc.collect()

    assert [ref() for ref in held] == [None, None]
    assert buffers.repeated


def _with_hook(drafter: Any) -> None:
    drafter.model.lm_head.register_forward_hook(lambda *_: None)


def _full(drafter: Any) -> None:
    drafter.config.attention = "full"


def _in_blocks(drafter: Any) -> None:
    drafter.config.attention = "block_causal"


def test_a_reason_says_why_drafts_cannot_be_of_fixed_shape() -> None:
    twins, budget = make_twins(num_rows=1), DraftBudget((4,), 8)
    assert twins.fixed.why_not_fixed(budget) is None
    reasons = [twins.fixed.why_not_fixed(DraftBudget((4,), 8, temperature=1.0))]
    for change in (_with_hook, _full, _in_blocks):
        change(twins.drafter)
        reasons.append(twins.fixed.why_not_fixed(budget))

    assert reasons == [
        "drafts are drawn, and their probabilities compared with the target's",
        "`lm_head` of the diffusion model has a hook, which a replay would leave out",
        'with `attention="full"` the diffusion model reads the text anew in every pass',
        'with `attention="block_causal"` the diffusion model reads the block that has begun anew in every pass',
    ]
