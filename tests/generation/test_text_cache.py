"""Texts in slots hold what lists say, whatever rows keep, whoever leaves, and go back to the cache that they came from."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from tests import reference
from tests.core.strategies import few, parent_lists
from transformers_falcon_spec.generation.stock_cache import prepared, stop_recording
from transformers_falcon_spec.generation.text_cache import ROOM, TextCache, TextView, why_no_slots

WINDOW = 5


def _read(cache: Any, labels: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Let both layers read tokens of these labels, and give back what attention sees."""
    states = torch.tensor(labels, dtype=torch.float)[:, None, :, None]
    return [cache.update(states, states + 0.5, layer) for layer in range(2)]


def _prompted(paddings: list[int], num_columns: int) -> tuple[DynamicCache, list[list[int]], torch.Tensor]:
    """A cache of a full and a sliding layer that holds prompts behind padding, their labels, and the slot of each column."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=WINDOW)]
    prepared(cache)
    columns = [[1000 * row + column for column in range(num_columns)] for row in range(len(paddings))]
    _read(cache, columns)
    cache.crop(0)
    slots = torch.tensor([[max(column - pad, -1) for column in range(num_columns)] for pad in paddings])
    texts = [labels[pad:] for labels, pad in zip(columns, paddings, strict=True)]
    return cache, texts, slots


def _held(text: TextCache, layer: int, row: int) -> list[int]:
    view: TextView = text.layers[layer].view
    num = view.lengths(text.num_tokens)[row]
    held = text.layers[layer].held
    labels = held["keys"][row, 0, :num, 0]
    assert torch.equal(held["values"][row, 0, :num, 0], labels + 0.5)
    return [int(label) for label in labels.tolist()]


@few
@given(st.data(), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_rows_hold_what_lists_say(data: st.DataObject, num_rows: int, num_columns: int, is_returned: bool) -> None:
    """Read trees, keep paths, let rows leave, drop what windows have left, in any order."""
    paddings = [data.draw(st.integers(0, num_columns - 1)) for _ in range(num_rows)]
    paddings[0] = 0
    cache, expected, slots = _prompted(paddings, num_columns)
    text = TextCache.moved(cache, slots, max_length=40)
    for view in text.views:
        view.capacity = max(view.lengths(text.num_tokens)) + data.draw(st.integers(0, 12))
        for layer in text.layers:
            if layer.view is view:
                layer.held = {name: states[:, :, : view.capacity] for name, states in layer.held.items()}
    numbers = list(range(num_rows))

    for _ in range(data.draw(st.integers(1, 8))):
        parents = data.draw(parent_lists())
        labels = [
            [100_000 * (row + 1) + 100 * len(expected[row]) + node for node in range(len(parents))] for row in numbers
        ]
        text.begin(len(parents))
        for layer, seen in enumerate(_read(text, labels)):
            view = text.layers[layer].view
            for row, (keys, _) in enumerate(zip(*seen, strict=True)):
                first = view.lengths(text.num_tokens)[row]
                assert keys[0, first : first + len(parents), 0].tolist() == labels[row]
        logits = torch.zeros(len(numbers), len(parents), 2)
        logits[data.draw(st.integers(0, len(numbers) - 1)), :, 0] = torch.nan if data.draw(st.booleans()) else 0.0
        text.note_spoilt(logits)

        paths = []
        for row, number in enumerate(numbers):
            end = data.draw(st.integers(-1, len(parents) - 1))
            path = reference.path_to(parents, end) if end >= 0 else ()
            paths.append(path)
            expected[number] = expected[number] + [labels[row][node] for node in path]
        text.keep(paths)
        if logits.isnan().any():  # what is not kept is forgotten
            for layer in text.layers:
                for row, num in enumerate(layer.view.lengths(text.num_tokens)):
                    behind = layer.held["keys"][row, 0, num : num + len(parents) - len(paths[row]), 0]
                    assert not behind.any()

        if len(numbers) > 1 and data.draw(st.booleans()):
            left = data.draw(st.integers(0, len(numbers) - 1))
            rows = [row for row in range(len(numbers)) if row != left]
            text.select(rows, keeps_others=is_returned)
            numbers = [numbers[row] for row in rows]
        for row, number in enumerate(numbers):
            assert _held(text, 0, row) == expected[number]
            kept = _held(text, 1, row)
            assert expected[number][len(expected[number]) - len(kept) :] == kept
            assert len(kept) >= min(WINDOW - 1, len(expected[number]))
        together = [row for group in text.groups for row in group]
        assert sorted(together) == list(range(len(numbers)))

    if is_returned:
        text.write_back(cache, [list(range(pad)) for pad in paddings])
        stop_recording(cache)
        end = max(len(row) + pad for row, pad in zip(expected, paddings, strict=True))
        assert cache.layers[0].keys.shape[-2] == cache.layers[1].cumulative_length == end
        for row, pad in enumerate(paddings):
            places = range(pad, pad + len(expected[row]))
            for layer in cache.layers:
                first = end - layer.keys.shape[-2]
                got = [int(layer.keys[row, 0, place - first, 0]) for place in places if place >= first]
                assert got == expected[row][len(expected[row]) - len(got) :]


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_rows_of_one_length_are_read_alone(num_nodes: int) -> None:
    cache, expected, slots = _prompted([0, 2, 0], 4)
    text = TextCache.moved(cache, slots, max_length=40)
    assert text.groups == [[0, 2], [1]]

    for rows in text.groups:
        labels = [[9000 + 10 * row + node for node in range(num_nodes)] for row in rows]
        text.begin(num_nodes, rows)
        assert text.get_seq_length() == len(expected[rows[0]])
        (keys, _), _ = _read(text, labels)
        assert keys[:, 0, :, 0].tolist() == [expected[row] + new for row, new in zip(rows, labels, strict=True)]
        assert text.get_seq_length() == len(expected[rows[0]]) + num_nodes
    text.keep([range(num_nodes)] * 3)

    assert [_held(text, 0, row) for row in range(3)] == [
        text + [9000 + 10 * row + node for node in range(num_nodes)] for row, text in enumerate(expected)
    ]


def test_the_keys_of_an_indexer_go_along() -> None:
    cache: Any = DynamicCache()
    cache.layers = [DynamicIndexedLayer()]
    states = torch.arange(8.0).reshape(2, 1, 4, 1)
    cache.update(states, states + 0.5, 0)
    cache.update_indexer(states[:, 0] + 100, 0)
    slots = torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]])
    assert why_no_slots(cache) is None
    text = TextCache.moved(cache, slots, max_length=40)

    text.begin(2)
    new = torch.tensor([[20.0, 21.0], [30.0, 31.0]])[:, None, :, None]
    indexer = text.update_indexer(new[:, 0] + 100, 0)
    text.update(new, new + 0.5, 0)
    assert indexer[1, :4, 0].tolist() == [106, 107, 130, 131]
    text.keep([(1,), (0,)])
    text.begin(ROOM)  # grows
    text.keep([(), ()])
    text.write_back(cache, [[], [0, 1]])

    assert cache.layers[0].indexer_keys[..., 0].tolist() == [[100, 101, 102, 103, 121], [0, 0, 106, 107, 130]]
    assert cache.layers[0].keys[:, 0, :, 0].tolist() == [[0, 1, 2, 3, 21], [0, 0, 6, 7, 30]]


def test_layers_with_tensors_that_nobody_knows_stay() -> None:
    cache, _, _ = _prompted([0], 4)
    layer: Any = cache.layers[1]
    layer.of_rows = torch.zeros(1, 1)

    assert why_no_slots(cache) == "a `DynamicSlidingWindowLayer` of the cache keeps ['of_rows'] besides its states"
