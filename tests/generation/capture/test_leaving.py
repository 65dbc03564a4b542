"""A text in fixed shapes ends: its keys and values go back where somebody gets them, and nothing is lost where memory ends."""

import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.every_drafter import every_drafter
from tests.tiny import in_double, make_drafter, make_prompt, make_target
from transformers_falcon_spec.drafters.tree_drafting.text import DraftText
from transformers_falcon_spec.generation import target as target_file
from transformers_falcon_spec.generation import text_cache
from transformers_falcon_spec.generation.capture import state as states
from transformers_falcon_spec.generation.capture.eligibility import NO_MEMORY
from transformers_falcon_spec.generation.capture.state import StaticState, occupy, states_of, vacate
from transformers_falcon_spec.generation.recurrent import FixedStates
from transformers_falcon_spec.generation.recurrent import states_of as states_held
from transformers_falcon_spec.generation.slot_cache import Shapes, SlotCache
from transformers_falcon_spec.generation.target import NO_ROOM, Target
from transformers_falcon_spec.generation.tuning import Tuner

ROUNDING = 1e-5  # of recurrent layers, whose rules are computed in single precision


def _pair(family: str = "llama", **options: Any) -> tuple[PreTrainedModel, Any]:
    """A target, and a drafter that knows most of its text."""
    target = in_double(make_target(family))
    drafter = InformedDrafter(RandomDrafter(tune=False), runs.plain(target, **options).sequences)
    drafter.generation_config.capture = True
    return target, drafter


def _assert_cached(mine: Any, other: Any) -> None:
    assert mine.get_seq_length() == other.get_seq_length()
    atol = ROUNDING if any(map(states_held, other.layers)) else 1e-10
    for layer, expected in zip(mine.layers, other.layers, strict=True):
        for name in ("keys", "values"):
            if hasattr(expected, name):
                torch.testing.assert_close(getattr(layer, name), getattr(expected, name), rtol=0, atol=atol)
        for key, state in states_held(expected).items():
            torch.testing.assert_close(states_held(layer)[key], state, rtol=0, atol=atol)


def _num_bytes(cache: SlotCache) -> int:
    """Memory of the states that a cache holds."""
    parts = [part for layer in cache.layers for part in (*layer.held.values(), *layer.seen.values())]
    return sum(part.untyped_storage().nbytes() for part in parts)


def test_nothing_is_copied_where_nobody_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = _pair()
    monkeypatch.setattr(text_cache, "write_layer", lambda *_: pytest.fail("a cache that nobody gets was filled"))

    ids = runs.drafted(target, drafter, return_dict_in_generate=False)

    assert ids.tolist() == runs.plain(target).sequences.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_that_was_given_holds_the_text(family: str) -> None:
    target, drafter = _pair(family)
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    plain = runs.plain(target, past_key_values=caches[0])

    ids = runs.drafted(target, drafter, past_key_values=caches[1], return_dict_in_generate=False)

    assert ids.tolist() == plain.sequences.tolist()
    _assert_cached(*caches)


def test_buffers_serve_others_only_once_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = _pair()
    write_layer, could_enter = text_cache.write_layer, set()

    def watched(*args: Any) -> None:
        could_enter.add(occupy(target))
        write_layer(*args)

    monkeypatch.setattr(text_cache, "write_layer", watched)

    runs.both(target, drafter).assert_equal()

    assert could_enter == {False}
    assert occupy(target)
    vacate(target)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("num_copied", [0, 1])
def test_without_memory_for_a_second_copy_nothing_is_lost(
    family: str, num_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = _pair(family)
    room, write_layer = [num_copied], text_cache.write_layer

    def with_little_room(*args: Any) -> None:
        if room[0] == 0:
            room[0] = 10**6  # once memory is freed
            raise torch.OutOfMemoryError("CUDA out of memory.")
        room[0] -= 1
        write_layer(*args)

    monkeypatch.setattr(text_cache, "write_layer", with_little_room)
    held: list[StaticState] = []
    free_work = StaticState.free_work
    monkeypatch.setattr(StaticState, "free_work", lambda state: (held.append(state), free_work(state)))

    pair = runs.both(target, drafter)

    pair.assert_equal()
    _assert_cached(pair.drafted.past_key_values, pair.plain.past_key_values)
    assert pair.stats.notes[1:] == [NO_ROOM]  # the first one says how the stand-in drafts
    assert not states_of(target)
    assert _num_bytes(held[0].cache) == 0
    again = runs.both(target, drafter, make_prompt(seed=1))
    again.assert_equal(is_kept=False)
    assert NO_ROOM not in again.stats.notes


@pytest.mark.parametrize(
    ("family", "num_rows", "lacks"),
    [
        ("llama", 1, "slots"),
        ("llama", 3, "slots"),
        ("gemma3", 1, "slots"),
        ("qwen3_5", 1, "slots"),
        ("qwen3_5", 1, "states"),
    ],
)
def test_a_text_that_finds_no_room_to_grow_goes_on_dynamically(
    family: str, num_rows: int, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "BUCKETS", Shapes(is_exact=False, least_slots=16))
    monkeypatch.setattr(states, "MOST_AHEAD", 4)
    if lacks == "slots":
        monkeypatch.setattr(StaticState, "grow", _fails)
    else:
        monkeypatch.setattr(FixedStates, "reserve", _fails)
    prompt = torch.cat([make_prompt(seed=row) for row in range(num_rows)])
    mask = torch.ones_like(prompt)
    mask[-1, : 5 * (num_rows > 1)] = 0
    options = {"max_new_tokens": 40, "do_sample": num_rows == 1, "attention_mask": mask}
    target = in_double(make_target(family))
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    prices, read, learn = [], Target.read, Tuner.learn

    def after_a_capture(self: Target, *args: Any) -> Any:
        self.read_price = 1.0  # of the step before
        return read(self, *args)

    monkeypatch.setattr(Target, "read", after_a_capture)
    monkeypatch.setattr(Tuner, "learn", lambda self, *args: (prices.append(args[-1]), learn(self, *args)))

    pair = runs.both(target, drafter, prompt, **options)

    pair.assert_equal(is_kept=False)
    if num_rows == 1:  # padding is whatever it was
        _assert_cached(pair.drafted.past_key_values, pair.plain.past_key_values)
    assert len(pair.stats.notes) == 1
    assert set(prices) == {None}  # that price is of no later step
    assert re.fullmatch(rf"From token \d+ on the step was not captured: {NO_MEMORY}\.", pair.stats.notes[0])


@pytest.mark.parametrize("kind", ["falcon", "medusa", "layers in parallel"])
def test_a_drafter_without_memory_for_buffers_drafts_as_ever(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = in_double(make_target())
    drafter = every_drafter(kind, target)
    drafter.generation_config.capture = True
    monkeypatch.setattr(DraftText, "begin", _fails)

    pair = runs.both(target, drafter)

    pair.assert_equal(is_kept=False)
    assert pair.stats.num_drafted > 0
    assert pair.stats.notes == [f"Drafts are not captured: {NO_MEMORY}."]


def test_a_call_without_memory_for_buffers_is_dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = _pair()
    monkeypatch.setattr(target_file, "reserve", _fails)

    pair = runs.both(target, drafter)

    pair.assert_equal()
    _assert_cached(pair.drafted.past_key_values, pair.plain.past_key_values)
    assert pair.stats.notes == [f"The step is not captured: {NO_MEMORY}."]
    assert not states_of(target)


def _fails(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")
