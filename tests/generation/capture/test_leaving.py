"""A text in fixed shapes ends: its keys and values go back where somebody gets them, and nothing is lost where memory ends."""

import re
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests import runs, tape
from tests.doubles import InformedDrafter, RandomDrafter
from tests.every_drafter import every_drafter
from tests.tiny import in_double, make_drafter, make_prompt, make_target
from transformers_falcon_spec.drafters.tree_drafting.text import DraftText
from transformers_falcon_spec.generation import text_cache
from transformers_falcon_spec.generation.capture import state as states
from transformers_falcon_spec.generation.capture import target as target_file
from transformers_falcon_spec.generation.capture.acceptor import DeviceAcceptor
from transformers_falcon_spec.generation.capture.eligibility import NO_MEMORY
from transformers_falcon_spec.generation.capture.state import StaticState, occupy, states_of, vacate
from transformers_falcon_spec.generation.capture.target import NO_ROOM, FixedTarget
from transformers_falcon_spec.generation.drafting import NO_DRAFTS
from transformers_falcon_spec.generation.recurrent import FixedStates
from transformers_falcon_spec.generation.recurrent import states_of as states_held
from transformers_falcon_spec.generation.slot_cache import Shapes, SlotCache, SlotLayer
from transformers_falcon_spec.generation.target import Target
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
        ("llama", 1, "slots of a layer"),
        ("llama", 3, "slots of a layer"),
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
    elif lacks == "slots of a layer":
        grow, grow_layer = StaticState.grow, SlotLayer.grow

        def grows_in_part(state: StaticState, capacity: int) -> None:
            last = state.cache.layers[-1]
            with monkeypatch.context() as patch:
                patch.setattr(SlotLayer, "grow", lambda layer: _fails() if layer is last else grow_layer(layer))
                grow(state, capacity)

        monkeypatch.setattr(StaticState, "grow", grows_in_part)
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
        if self.fixed is not None:
            self.fixed.read_price = 1.0  # of the step before
        return read(self, *args)

    monkeypatch.setattr(Target, "read", after_a_capture)
    monkeypatch.setattr(Tuner, "learn", lambda self, *args: (prices.append(args[-1]), learn(self, *args)))

    pair = runs.both(target, drafter, prompt, **options)

    pair.assert_equal(is_kept=False)
    if num_rows == 1:  # padding is whatever it was
        _assert_cached(pair.drafted.past_key_values, pair.plain.past_key_values)
    notes = [note for note in pair.stats.notes if not note.startswith("Drafts had at most 1 nodes")]
    assert len(notes) == 1
    assert set(prices) == {None}  # that price is of no later step
    assert re.fullmatch(rf"From token \d+ on the step was not captured: {NO_MEMORY}\.", notes[0])


@pytest.mark.parametrize("kind", ["falcon", "medusa", "layers in parallel"])
def test_a_drafter_without_memory_for_buffers_drafts_as_ever(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = in_double(make_target())
    drafter = every_drafter(kind, target)
    drafter.generation_config.capture = True
    begin = DraftText.begin
    monkeypatch.setattr(DraftText, "begin", lambda text: _fails() if text.is_fixed else begin(text))
    were_fixed: list[bool] = []
    limited = Tuner.limited
    monkeypatch.setattr(
        Tuner, "limited", lambda self, budget: (were_fixed.append(self.has_fixed_drafts), limited(self, budget))[1]
    )

    pair = runs.both(target, drafter)

    pair.assert_equal(is_kept=False)
    assert pair.stats.num_drafted > 0
    assert pair.stats.notes == [f"Drafts are not captured: {NO_MEMORY}."]
    assert were_fixed
    assert not any(were_fixed)  # the tuner prices nodes again


def test_a_call_without_memory_for_buffers_is_dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = _pair()
    monkeypatch.setattr(target_file, "reserve", _fails)

    pair = runs.both(target, drafter)

    pair.assert_equal()
    _assert_cached(pair.drafted.past_key_values, pair.plain.past_key_values)
    assert pair.stats.notes == [f"The step is not captured: {NO_MEMORY}."]
    assert not states_of(target)


def test_a_target_whose_texts_could_not_be_taken_serves_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = _pair()
    with monkeypatch.context() as patch:
        patch.setattr(target_file, "fill", _fails)
        with pytest.raises(torch.OutOfMemoryError):
            runs.drafted(target, drafter)

    pair = runs.both(target, drafter)

    pair.assert_equal()
    assert not any("is not captured" in note for note in pair.stats.notes)


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
def test_a_read_that_finds_no_memory_in_its_middle_is_done_without_a_graph_or_without_buffers(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape.install(monkeypatch)
    target, drafter = _pair()
    plain = runs.plain(target)
    kind = type(target.model.layers[0].mlp)
    forward, read = kind.forward, FixedTarget._read
    num_failed = [-1]  # -1: not yet

    def reading(self: FixedTarget, *args: Any) -> Any:
        num_failed[0] = max(num_failed[0], 0)
        try:
            return read(self, *args)
        finally:
            num_failed[0] = -1 if always else num_failed[0]

    def failing(part: Any, states: torch.Tensor) -> torch.Tensor:
        if num_failed[0] == 0 or (always and num_failed[0] > 0):
            num_failed[0] += 1
            _fails()
        found: torch.Tensor = forward(part, states)
        return found

    monkeypatch.setattr(FixedTarget, "_read", reading)
    monkeypatch.setattr(kind, "forward", failing)
    drafted = runs.drafted(target, drafter)

    assert drafted.sequences.tolist() == plain.sequences.tolist()
    notes = " ".join(drafted.speculation.notes)
    assert "could not be captured and ran without: CUDA out of memory." in notes
    assert (f"on the step was not captured: {NO_MEMORY}" in notes) == always
    assert drafted.speculation.num_drafted > 0


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_host_chooses_where_the_device_has_no_memory_for_it(
    do_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = _pair(do_sample=do_sample)
    run, num_runs = DeviceAcceptor._run, [0]

    def runs_twice(self: DeviceAcceptor, *args: Any) -> None:
        num_runs[0] += 1
        if num_runs[0] == 3:
            with monkeypatch.context() as patch:
                patch.setattr(StaticState, "keep", _fails)  # the last that it does
                run(self, *args)
        run(self, *args)

    monkeypatch.setattr(DeviceAcceptor, "_run", runs_twice)
    pair = runs.both(target, drafter, do_sample=do_sample)

    pair.assert_equal()
    assert num_runs == [3]
    assert f"The host chooses tokens: {NO_MEMORY}." in pair.stats.notes
    assert pair.stats.acceptance_length > 1


def test_a_drafter_without_memory_for_new_text_leaves_the_rest_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target = in_double(make_target())
    drafter = every_drafter("falcon", target)
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    add, num_added = DraftText.add_kept, []

    def adds_twice(self: DraftText, *args: Any) -> None:
        num_added.append(1)
        if len(num_added) == 3:
            _fails()
        add(self, *args)

    monkeypatch.setattr(DraftText, "add_kept", adds_twice)

    pair = runs.both(target, drafter)

    pair.assert_equal(is_kept=False)
    assert len(num_added) == 3
    assert pair.stats.num_drafted > 0
    assert pair.stats.notes.count(NO_DRAFTS) == 1


def test_drafts_are_as_large_as_there_is_memory_for_recurrent_states(monkeypatch: pytest.MonkeyPatch) -> None:
    target = in_double(make_target("qwen3_5"))
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    for file in (states, target_file):
        monkeypatch.setattr(file, "NODE_BUCKETS", (1, 2, 4, 8, 16))  # it drafts a few nodes
    reserve, sizes = FixedStates.reserve, set()

    def has_room_for_2(self: FixedStates, num_nodes: int) -> bool:
        if num_nodes > 2:
            _fails()
        sizes.add(num_nodes)
        return reserve(self, num_nodes)

    monkeypatch.setattr(FixedStates, "reserve", has_room_for_2)

    pair = runs.both(target, drafter)

    pair.assert_equal(is_kept=False)
    assert max(sizes) == 2
    assert pair.stats.num_drafted > 0
    assert pair.stats.notes == ["Drafts had at most 2 nodes: no memory was left for recurrent states of more."]


def test_states_that_find_no_room_to_grow_stay_where_they_are() -> None:
    held = FixedStates()
    texts = {(layer, "recurrent_states", 0): torch.full((2, 3), float(layer)) for layer in range(2)}
    held.take(texts)
    before = held.texts
    room = held._room

    held._room = lambda state, num: room(state, num) if state[0, 0] == 0 else _fails()  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        held.reserve(8)

    assert [state.data_ptr() for state in held.texts.values()] == [state.data_ptr() for state in before.values()]


def _fails(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")
