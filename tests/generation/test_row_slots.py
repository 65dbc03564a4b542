"""Slots that several rows share: kept, realigned, selected and put back as lists say."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests import reference
from tests.core.strategies import few, parent_lists
from transformers_falcon_spec.generation.cache import narrow, prepared, widen
from transformers_falcon_spec.generation.row_slots import RowSlots

WINDOW = 4


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
    """Read, keep, tidy in any order: no token is lost, moved past another or taken for one of another row."""
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


@few
@given(st.data(), st.integers(1, 6))
def test_selected_rows_hold_what_they_held_and_all_come_back(data: st.DataObject, num_rows: int) -> None:
    """Rows leave a few at a time; rows of a list, of which some are taken, say what must be where."""
    num_slots = data.draw(st.integers(1, 8))
    texts = [sorted(data.draw(st.sets(st.integers(0, num_slots - 1), min_size=1))) for _ in range(num_rows)]
    slots = _rows_of([[slot if slot in text else -1 for slot in range(num_slots)] for text in texts])
    numbers = list(range(num_rows))
    while numbers:
        chosen = sorted(data.draw(st.sets(st.integers(0, len(numbers) - 1))))
        if not chosen:
            break
        slots.select(chosen, keeps_others=True)
        numbers = [numbers[row] for row in chosen]
        held = [[position for position in row if position >= 0] for row in slots.positions.tolist()]
        assert held == [texts[number] for number in numbers]
        assert slots.num_tokens == list(map(len, held))
        for row, positions in enumerate(slots.positions.tolist()):
            labels = slots.cache.layers[0].keys[row].flatten().tolist()
            assert all(label == position for label, position in zip(labels, positions, strict=True) if position >= 0)
        if len(chosen) < 2:
            break

    slots = slots.with_all_rows()
    slots.unroll()

    assert [[each for each in row if each >= 0] for row in slots.positions.tolist()] == texts
    for row, text in enumerate(texts):
        assert slots.cache.layers[0].keys[row, 0, text, 0].tolist() == text


@pytest.mark.parametrize("change", ["select", "realign", "put back"])
def test_no_layer_is_there_twice_while_another_one_is_copied(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = prepared(DynamicCache())
    for index in range(4):
        cache.update(torch.zeros(3, 1, 8, 2), torch.zeros(3, 1, 8, 2), index)
    positions = torch.arange(8).repeat(3, 1)
    positions[:, 0] = -1  # padding, which is dropped
    slots = RowSlots(cache, positions)
    if change == "put back":
        slots.select([0, 2], keeps_others=True)
    old: list[weakref.ref[torch.Tensor]] = []
    most_copied: list[int] = []

    def noticed(layer: DynamicLayer, name: str, value: object) -> None:
        if name in ("keys", "values"):
            old.append(weakref.ref(getattr(layer, name)))
        object.__setattr__(layer, name, value)
        most_copied.append(sum(each() is not None for each in old))

    monkeypatch.setattr(DynamicLayer, "__setattr__", noticed)
    {"select": lambda: slots.select([0, 2]), "realign": slots._realign, "put back": slots.with_all_rows}[change]()

    assert len(old) >= 8
    assert max(most_copied) <= 2  # of 8
