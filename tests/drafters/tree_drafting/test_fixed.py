"""Drafts in fixed shapes are those of the same drafter as ever, and nothing in them asks the host or changes place."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.drafters.texts import merged
from tests.drafters.tree_drafting.twins import DRAFTERS, MOST_KEPT, Twins, as_kept, assert_same, to_meta
from tests.tape import install
from transformers_falcon_spec.drafters.tree_drafting import proposing
from transformers_falcon_spec.drafters.tree_drafting.text import DraftText
from transformers_falcon_spec.generation.drafting import DraftBudget, Kept
from transformers_falcon_spec.generation.slot_cache import BUCKETS, EXACT

NUM_STEPS = 8
FEW = (
    "falcon-2 with a transition, static",
    "falcon-2 of tokens, grown",
    "eagle-3, grown",
    "eagle-1, static",
    "medusa",
    "dflash, grown",
    "dflash with a window, static",
    "dflash of the second version, grown",
    "a small language model, static",
    "layers with windows, grown",
)
ALL = [pytest.param(name, marks=() if name in FEW else [pytest.mark.families, pytest.mark.slow]) for name in DRAFTERS]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def decode(twins: Twins, temperature: float | None = None, num_steps: int = NUM_STEPS) -> None:
    """Many steps, each of which keeps some tokens of every row; some of them without a draft."""
    num_rows = len(twins.texts)
    num_new = [1] * num_rows
    for step in range(num_steps):
        if step % 4 != 2:  # else drafting pauses
            depths = [0 if not num else twins.rng.choice([2, 4, 100]) for num in num_new]
            plain, fixed = twins.drafts(depths, temperature)
            assert plain is not None
            assert_same(plain, fixed, num_rows)
        num_new = [twins.rng.randint(int(row == 0), MOST_KEPT) for row in range(num_rows)]
        twins.give(num_new, is_kept=step % 3 != 1)


@pytest.mark.parametrize("num_rows", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", ALL)
def test_drafts_are_those_of_the_same_drafter_as_ever(name: str, num_rows: int) -> None:
    decode(Twins(name, num_rows))


@pytest.mark.parametrize("name", ALL)
def test_drafts_by_noise_are_those_of_the_same_drafter_as_ever(name: str) -> None:
    decode(Twins(name, num_rows=2, seed=5), temperature=0.7)


@pytest.mark.parametrize("temperature", [pytest.param(None, marks=pytest.mark.slow), 0.7])
@pytest.mark.parametrize("name", ALL)
def test_work_that_is_replayed_drafts_the_same(
    name: str, temperature: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tapes = install(monkeypatch)
    twins = Twins(name, num_rows=2, seed=7)

    decode(twins, temperature)

    # the pairs of a step and of many, drafts of one shape, and pairs that a step kept
    assert 3 <= len(tapes) == len(twins.buffers.repeated) <= 4


@pytest.mark.parametrize("name", ["falcon-2 of tokens, grown", "eagle-1, static"])
def test_what_drafted_tokens_leave_spoils_no_later_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_drafted = DraftText.forget_drafted

    def overflowing(self: DraftText) -> None:
        for layer in self.cache.layers:
            for states in layer.held.values():
                states[:, :, self.num_shown : self.num_shown + self._num_drafted] = torch.nan
        forget_drafted(self)

    monkeypatch.setattr(DraftText, "forget_drafted", overflowing)

    decode(Twins(name, num_rows=2))


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("name", [name for name in FEW if name.endswith("grown")])
def test_drafts_of_more_tokens_than_were_counted_on_get_room(
    name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(name, num_rows)
    plain, _ = twins.drafts((100,) * num_rows)
    with monkeypatch.context() as patch:
        patch.setattr(proposing, "ROOM", 0)
        patch.setattr(proposing, "EXACT", replace(EXACT, least_slots=1))
        patch.setattr(type(twins.plain), "num_draft_slots", 0)
        limited = twins._generator()
        first = [text.num_pairs for text in twins.texts]
        for text in twins.texts:
            text.num_pairs = 0
        limited.commit(merged([text.more(num) for text, num in zip(twins.texts, first, strict=True)]))
        draft = limited.propose(DraftBudget((100,) * num_rows, 512))

    assert_same(plain, draft, num_rows)


@pytest.mark.parametrize("name", FEW)
def test_rows_that_stay_draft_on_in_exact_shapes(name: str) -> None:
    twins = Twins(name, num_rows=3)
    decode(twins, num_steps=2)
    row, text = 1, twins.texts[1]
    first, text.num_pairs = text.num_pairs, 0

    twins.plain.select_rows([row])
    alone = twins._generator()
    alone.commit(text.more(first))
    alone.propose(DraftBudget((100,), 512))
    more = text.more(3)
    drafts = []
    for generator in (twins.plain, alone):
        generator.commit(more)
        drafts.append(generator.propose(DraftBudget((100,), 512)))

    assert_same(*drafts, 1)


def on_meta(twins: Twins) -> None:
    """Move everything that fixed work uses to the device on which each question to the host is an error."""
    twins.model.to("meta")
    twins.drafter.to("meta")
    buffers = twins.buffers
    to_meta(buffers, buffers.cache, *buffers.cache.layers, twins.fixed)
    buffers.carried = {name: states.to("meta") for name, states in buffers.carried.items()}
    twins.noise = twins.noise.to("meta")
    backend = getattr(twins.fixed, "_backend", None)
    if backend is not None:  # which may have weights of its own
        twins.fixed._backend = type(backend)(twins.drafter.layered, backend.groups)


@pytest.mark.parametrize("temperature", [pytest.param(None, marks=pytest.mark.slow), 0.7])
@pytest.mark.parametrize("name", ALL)
def test_nothing_is_asked_of_the_host(name: str, temperature: float | None) -> None:
    twins = Twins(name, num_rows=2)
    on_meta(twins)
    noise = None if temperature is None else twins.noise_ahead
    kept = as_kept(merged([text.more(num) for text, num in zip(twins.texts, (3, 0), strict=True)]))
    kept = Kept(kept.token_ids.to("meta"), kept.features.to("meta"), kept.num.to("meta"), kept.num_new)

    twins.fixed.commit_kept(kept)
    draft = twins.fixed.propose(DraftBudget((100, 0), 512, temperature=temperature, noise=noise))

    assert draft.token_ids.device.type == draft.parents.device.type == "meta"
    assert draft.token_ids.shape == draft.parents.shape


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(
    "limits",
    [{"num_nodes": 7}, {"num_passes": 1}, {"is_chain": True}, {"num_passes": 0}],
)
def test_the_budget_limits_fixed_drafts_alike(name: str, limits: dict[str, Any]) -> None:
    twins = Twins(name, num_rows=2)

    for _ in range(3):
        plain, drafted = twins.drafts((100, 100), **limits)
        assert_same(plain, drafted, 2)
        assert drafted.num_passes == plain.num_passes
        twins.give((2, 3))


@pytest.mark.parametrize("name", FEW)
def test_text_that_outgrows_the_buffers_goes_on_in_larger_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposing, "BUCKETS", replace(BUCKETS, least_slots=16))
    monkeypatch.setattr(proposing, "EXACT", replace(EXACT, least_slots=8))
    monkeypatch.setattr(proposing, "ROOM", 1)
    twins = Twins(name, num_rows=2, num_slots=16)

    decode(twins, num_steps=12)

    assert max(twins.fixed.text.num_read) > 32
    assert max(twins.plain.text.num_read) < max(twins.plain.text.num_slots, 1) < 128 or name == "medusa"
    assert (twins.buffers.num_slots > 32) == (name != "medusa")  # which keeps no more than the newest pair


@pytest.mark.parametrize("name", FEW)
def test_pauses_of_any_length_forget_nothing(name: str) -> None:
    twins = Twins(name, num_rows=2)

    for step in range(25):
        twins.give((MOST_KEPT - 1, step % 3), is_kept=step % 5 > 0)
    plain, drafted = twins.drafts((100, 100))

    assert_same(plain, drafted, 2)


@pytest.mark.parametrize("name", FEW)
def test_a_text_that_ended_for_the_host_alone_disturbs_nobody(name: str) -> None:
    twins = Twins(name, num_rows=2)

    for _ in range(14):
        twins.give((1, 0), is_kept=True, num_ended=MOST_KEPT)
    plain, drafted = twins.drafts((100, 0))

    assert_same(plain, drafted, 1)


@pytest.mark.parametrize("name", FEW)
def test_a_later_call_goes_on_in_the_same_buffers(name: str) -> None:
    first = Twins(name, num_rows=2)
    decode(first, temperature=0.5)
    second = Twins(name, num_rows=2, seed=9, buffers=first.buffers, pair=(first.model, first.drafter))

    decode(second, temperature=0.5)

    assert second.buffers is first.buffers


@pytest.mark.parametrize("name", FEW)
def test_buffers_of_another_number_of_rows_are_left_alone(name: str) -> None:
    first = Twins(name, num_rows=2)
    second = Twins(name, num_rows=1, seed=9, buffers=first.buffers, pair=(first.model, first.drafter))

    decode(second)

    assert second.buffers is not first.buffers


def test_buffers_made_in_inference_mode_serve_calls_without_it() -> None:
    with torch.inference_mode():
        first = Twins(FEW[0], num_rows=2)
        decode(first, temperature=0.5)
    second = Twins(FEW[0], num_rows=2, seed=9, buffers=first.buffers, pair=(first.model, first.drafter))

    decode(second, temperature=0.5)

    assert second.buffers is first.buffers


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (
            DraftBudget((4,), 8, temperature=1.0),
            "drafts are drawn, and their probabilities compared with the target's",
        ),
        (DraftBudget((4,), 8), None),
    ],
)
def test_a_reason_says_why_drafts_cannot_be_of_fixed_shape(budget: DraftBudget, reason: str | None) -> None:
    assert Twins("falcon-2 of tokens, grown", num_rows=1).fixed.why_not_fixed(budget) == reason


def test_buffers_hold_neither_drafter_nor_target() -> None:
    twins = Twins("falcon-2 of tokens, grown", num_rows=1)
    decode(twins)
    buffers, held = twins.buffers, [weakref.ref(twins.drafter), weakref.ref(twins.target)]

    del twins
    gc.collect()

    assert [ref() for ref in held] == [None, None]
    assert buffers.num_slots == 256
