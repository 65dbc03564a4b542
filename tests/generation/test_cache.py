"""What this package relies on in Transformers' caches: keeping a path, forgetting slots, sliding windows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests import reference, runs
from tests.core.strategies import few, parent_lists
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.generation.cache import (
    GroupSlice,
    RowSlots,
    drop_last,
    narrow,
    new_cache,
    num_held,
    prepared,
    widen,
)

WINDOW = 4


def _labelled_cache(num_slots: int) -> DynamicCache:
    """A full and a sliding layer whose slots hold their own numbers, read in one go."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=WINDOW)]
    cache = prepared(cache)
    _read(cache, list(range(num_slots)))
    return cache


def _read(cache: Cache, labels: list[int]) -> None:
    states = torch.tensor(labels, dtype=torch.float32).reshape(1, 1, -1, 1)
    for index in range(2):
        cache.update(states, states + 1000, index)


def _labels(cache: Cache, layer_index: int) -> list[int]:
    layer = cache.layers[layer_index]
    assert layer.values.flatten().tolist() == [label + 1000 for label in layer.keys.flatten().tolist()]
    return [int(label) for label in layer.keys.flatten()]


def _window(labels: list[int]) -> list[int]:
    """What a sliding layer still needs."""
    return labels[-WINDOW + 1 :]


@few
@given(parent_lists(), st.data(), st.integers(0, 7))
def test_keep_path_is_what_index_lists_say(parents: list[int], data: st.DataObject, num_before: int) -> None:
    path = reference.path_to(parents, data.draw(st.integers(0, len(parents) - 1)))
    cache = _labelled_cache(num_before)
    drop_last(cache, 0)
    nodes = list(range(100, 100 + len(parents)))
    _read(cache, nodes)

    slots = RowSlots(cache, torch.arange(num_before + len(parents))[None])
    slots.keep(len(parents), [path])

    expected = reference.keep_path([*range(num_before), *nodes], len(parents), path)
    assert _labels(cache, 0) == expected
    assert _labels(cache, 1) == _window(expected)
    assert cache.get_seq_length() == len(expected)
    assert cache.layers[1].get_seq_length() == len(expected)


@few
@given(st.integers(1, 12), st.integers(0, 12))
def test_drop_last_forgets_the_newest_slots_of_every_layer(num_slots: int, num_dropped: int) -> None:
    num_dropped = min(num_dropped, num_slots)
    cache = _labelled_cache(num_slots)

    drop_last(cache, num_dropped)

    expected = list(range(num_slots - num_dropped))
    assert _labels(cache, 0) == expected
    assert _labels(cache, 1) == _window(expected)


def test_what_was_drafted_is_dropped_from_every_layer_that_read_it() -> None:
    cache = DynamicCache()
    for layer, num_slots in enumerate((4, 7, 5)):
        states = torch.arange(num_slots, dtype=torch.float32).reshape(1, 1, -1, 1)
        cache.update(states, states + 1000, layer)

    RowSlots(cache, torch.arange(4)[None]).forget_drafted()

    assert [_labels(cache, layer) for layer in range(3)] == [[0, 1, 2, 3]] * 3


def test_dropping_nothing_shrinks_sliding_layers_to_their_window() -> None:
    cache = _labelled_cache(9)

    drop_last(cache, 0)

    assert _labels(cache, 0) == list(range(9))
    assert _labels(cache, 1) == [6, 7, 8]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "minicpm3"])
def test_kept_slots_are_those_of_reading_the_text_at_once(family: str) -> None:
    model, prompt = make_target(family).double(), make_prompt(11)
    token_ids, path = make_prompt(len(runs.BUSHY), 1)[0].tolist(), (0, 1, 4, 7)
    target = runs.prefilled(model, prompt)
    runs.tree_logits(target, token_ids, runs.BUSHY)

    target.keep(len(token_ids), [path])

    text = torch.cat([prompt, torch.tensor([[token_ids[node] for node in path]])], dim=-1)
    at_once = runs.prefilled(model, text).cache
    for kept, plain in zip(target.cache.layers, at_once.layers, strict=True):
        length = plain.keys.shape[-2]
        assert kept.get_seq_length() == plain.get_seq_length() == 15
        torch.testing.assert_close(kept.keys[..., -length:, :], plain.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kept.values[..., -length:, :], plain.values, rtol=1e-5, atol=1e-5)


def _row_labels(slots: RowSlots) -> list[list[int]]:
    """Of each row the labels and positions of what its slots hold, in the order of the slots; both are the same here."""
    found = []
    for row, positions in enumerate(slots.positions.tolist()):
        for layer in slots.cache.layers:
            labels = layer.keys[row].flatten().tolist()
            assert [label for label, position in zip(labels, positions, strict=True) if position >= 0] == [
                1000 * row + position for position in positions if position >= 0
            ]
        found.append([position for position in positions if position >= 0])
        assert slots.num_tokens[row] == len(found[row])
    return found


@few
@given(st.data(), st.integers(2, 3), st.integers(1, 9))
def test_rows_that_keep_different_tokens_hold_what_lists_say(data: st.DataObject, num_rows: int, prompt: int) -> None:
    """Read, keep, forget, tidy in any order: no token is lost, moved past another or taken for one of another row."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=WINDOW)]
    windows = widen(prepared(cache))
    slots = RowSlots(cache, torch.zeros(num_rows, 0, dtype=torch.long))
    expected: list[list[int]] = [[] for _ in range(num_rows)]

    def read(positions: list[list[int]]) -> None:
        labels = torch.tensor([[1000 * row + position for position in of_row] for row, of_row in enumerate(positions)])
        for index in range(2):
            cache.update(labels[:, None, :, None].float(), labels[:, None, :, None].float(), index)
        slots.append(torch.tensor(positions))

    read([list(range(prompt))] * num_rows)
    expected = [list(range(prompt)) for _ in range(num_rows)]
    for _ in range(data.draw(st.integers(1, 6))):
        parents = data.draw(parent_lists())
        depths = [len(reference.path_to(parents, node)) - 1 for node in range(len(parents))]
        firsts = [(row[-1] + 1 if row else 0) for row in expected]
        read([[first + depth for depth in depths] for first in firsts])
        ends = [data.draw(st.integers(-1, len(parents) - 1)) for _ in range(num_rows)]
        ends[0] = max(ends[0], 0)  # some row is still growing
        paths = [reference.path_to(parents, end) if end >= 0 else () for end in ends]
        slots.keep(len(parents), paths)
        expected = [
            row + [first + depths[node] for node in path]
            for row, first, path in zip(expected, firsts, paths, strict=True)
        ]
        dropped = [data.draw(st.integers(0, min(len(row), 2))) for row in expected]
        slots.forget(dropped)
        expected = [row[: len(row) - num] for row, num in zip(expected, dropped, strict=True)]
        if data.draw(st.booleans()):
            slots.tidy()
        if any(expected) and data.draw(st.booleans()):
            slots.align()
        assert _row_labels(slots) == expected
    if all(expected):
        slots.unroll()
        assert _row_labels(slots) == expected
        assert all(slot in (position, -1) for row in slots.positions.tolist() for position, slot in enumerate(row))
        narrow(cache, windows)
        assert cache.layers[1].keys.shape[-2] == min(max(map(len, expected)), WINDOW - 1)


def _rows_of(positions: list[list[int]]) -> RowSlots:
    """Slots whose tokens are labelled with their positions; padding with -1."""
    states = torch.tensor(positions, dtype=torch.float32)[:, None, :, None]
    cache = DynamicCache()
    cache.update(states, states, 0)
    return RowSlots(cache, torch.tensor(positions))


def test_realigned_tokens_stay_as_far_apart_as_their_positions() -> None:
    slots = _rows_of([[0, 1, -1, -1], [-1, 1, -1, 3], [0, 1, 2, 3]])
    states = torch.zeros(3, 1, 2, 1)
    slots.cache.update(states, states, 0)
    slots.append(torch.tensor([[4, 5]] * 3))

    slots.keep(2, [(), (0,), (0, 1)])
    slots.align()

    assert slots.positions.tolist() == [[-1, -1, 0, 1, -1, -1], [-1, -1, 1, -1, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert slots.cache.layers[0].keys[0, 0, 2:4, 0].tolist() == [0, 1]


def test_tokens_that_were_read_behind_holes_are_put_at_their_positions() -> None:
    slots = _rows_of([[0, 1], [0, 1]])
    states = torch.tensor([[7.0, 2.0], [2.0, 3.0]])[:, None, :, None]
    slots.cache.update(states, states, 0)
    slots.append(torch.tensor([[-1, 2], [2, 3]]), [1, 2])

    slots.unroll()

    assert slots.positions.tolist() == [[0, 1, 2, -1], [0, 1, 2, 3]]
    assert slots.cache.layers[0].keys[0, 0, :3, 0].tolist() == [0, 1, 2]


def test_padding_that_all_rows_share_comes_back_with_their_positions() -> None:
    slots = _rows_of([[-1, -1, 2, 3], [-1, -1, -1, 3]])

    slots.tidy()
    assert slots.positions.tolist() == [[2, 3], [-1, 3]]
    slots.unroll()

    assert slots.positions.tolist() == [[-1, -1, 2, 3], [-1, -1, -1, 3]]


def test_rows_may_go_on_until_a_window_is_full() -> None:
    assert widen(runs.prefilled(make_target("mistral"), make_prompt(7)).cache) == {0: 8, 1: 8, 2: 8}


@pytest.mark.parametrize("length", [8, 12])
def test_slots_that_were_dropped_cannot_be_shared_by_rows(length: int) -> None:
    cache = runs.prefilled(make_target("mistral"), make_prompt(length)).cache

    with pytest.raises(GenerationError, match="dropped what left their sliding window"):
        widen(cache)


def test_held_slots_are_asked_from_the_layer() -> None:
    cache = runs.prefilled(make_target("gemma3"), make_prompt(12)).cache

    assert [num_held(cache, index) for index in range(3)] == [7, 12, 7]
    assert num_held(cache, 99) == 0
    assert num_held(new_cache(make_target("llama").config), 0) == 0


def test_a_static_cache_is_refused() -> None:
    cache = StaticCache(config=make_target("llama").config, max_cache_len=32)

    with pytest.raises(
        GenerationError, match=r"needs a `DynamicCache`, but the call uses a `StaticCache`\. Leave out"
    ):
        prepared(cache)


def test_layers_that_share_a_slice_see_what_they_would_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    apart, shared = DynamicCache(), DynamicCache()

    for num_tokens, is_whole in ((5, False), (3, True), (2, False)):
        group = GroupSlice(shared, 0, [4, 5, 6])
        states = torch.randn(2, 3, 2, 2, num_tokens, 8, generator=draw)  # keys and values, layers, rows, heads
        expected = [apart.update(states[0, layer], states[1, layer], layer) for layer in range(3)]
        if is_whole:
            group.extend(*states.transpose(1, 2).flatten(2, 3))
        else:
            for layer in range(3):
                found = group.update(states[0, layer], states[1, layer], 4 + layer)
                assert found[0].equal(expected[layer][0])
                assert found[1].equal(expected[layer][1])

    for name in ("keys", "values"):
        assert getattr(shared.layers[0], name).equal(
            torch.cat([getattr(layer, name) for layer in apart.layers], dim=1)
        )
