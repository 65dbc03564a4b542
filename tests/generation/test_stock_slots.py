"""Texts that stay in a cache of Transformers: one row keeps any path, several keep in step, and nothing is moved by guess."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tests import reference
from tests.core.strategies import few, parent_lists
from transformers_falcon_spec.errors import TargetError
from transformers_falcon_spec.generation.stock_cache import StockSlots, prepared, why_slots_stay

WINDOW = 4


def _cache() -> Any:
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=WINDOW)]
    return prepared(cache)


def _read(cache: Cache, labels: list[list[int]]) -> None:
    states = torch.tensor(labels, dtype=torch.float)[:, None, :, None]
    for index in range(2):
        cache.update(states, states + 0.5, index)


def _labels(cache: Any, layer: int, row: int) -> list[int]:
    keys = cache.layers[layer].keys[row, 0, :, 0]
    assert torch.equal(cache.layers[layer].values[row, 0, :, 0], keys + 0.5)
    return [int(label) for label in keys.tolist()]


@few
@given(st.data(), st.integers(1, 9))
def test_one_row_keeps_any_path(data: st.DataObject, num_prompt: int) -> None:
    cache, expected = _cache(), list(range(num_prompt))
    _read(cache, [expected])
    cache.crop(0)
    slots = StockSlots(cache, torch.arange(num_prompt)[None])

    for turn in range(1, data.draw(st.integers(2, 6))):
        parents = data.draw(parent_lists())
        labels = [100 * turn + node for node in range(len(parents))]
        _read(cache, [labels])
        end = data.draw(st.integers(-1, len(parents) - 1))
        path = reference.path_to(parents, end) if end >= 0 else ()
        slots.keep(len(parents), [path])

        expected = expected + [labels[node] for node in path]
        assert _labels(cache, 0, 0) == expected
        window = _labels(cache, 1, 0)
        assert window == expected[len(expected) - len(window) :]
        assert len(window) == min(len(expected), WINDOW - 1)
        assert slots.positions.tolist() == [list(range(len(expected)))]
        assert slots.mask_of_chain(3) is None


def test_a_row_that_has_ended_leaves_holes_that_a_mask_hides() -> None:
    cache = _cache()
    _read(cache, [[0, 1], [7, 2]])
    slots = StockSlots(cache, torch.tensor([[0, 1], [-1, 1]]))
    assert not slots.has_gaps

    for label in (3, 4):
        _read(cache, [[label], [label]])
        slots.keep(1, [(0,), ()])

    assert slots.positions.tolist() == [[0, 1, 2, 3], [-1, 1, -1, -1]]
    assert slots.mask_of_chain(1).tolist() == [[1, 1, 1, 1, 1], [0, 1, 0, 0, 1]]
    assert _labels(cache, 0, 0) == [0, 1, 3, 4]


def test_holes_of_ended_rows_alone_are_hidden() -> None:
    cache = _cache()
    _read(cache, [[0, 1], [0, 1]])
    slots = StockSlots(cache, torch.arange(2).repeat(2, 1))
    assert slots.mask_of_chain(1) is None

    _read(cache, [[2], [2]])
    slots.keep(1, [(), (0,)])

    assert slots.mask_of_chain(1).tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]


def test_a_chain_is_read_without_asking_the_device() -> None:
    cache = _cache()
    _read(cache, [[0, 1], [0, 1]])
    slots = StockSlots(cache, torch.arange(2).repeat(2, 1))
    slots.positions = slots.positions.to("meta")  # of which no value can be asked

    assert slots.mask_of_chain(3) is None
    slots.keep(0, [(), ()])
    assert slots.mask_of_chain(3) is None
    _read(cache, [[2], [2]])
    slots.keep(1, [(), (0,)])
    mask = slots.mask_of_chain(3)
    assert mask is not None
    assert mask.shape == (2, 6)


def test_padding_between_tokens_is_a_gap() -> None:
    positions = torch.tensor([[-1, 1, -1, 3], [0, 1, 2, 3]])

    assert StockSlots(None, positions).has_gaps
    assert not StockSlots(None, positions[:, :2]).has_gaps


def test_rows_that_keep_different_numbers_of_tokens_are_refused() -> None:
    cache = _cache()
    _read(cache, [[0, 1], [0, 1]])
    slots = StockSlots(cache, torch.zeros(2, 0, dtype=torch.long))

    with pytest.raises(TargetError, match="keep in step"):
        slots.keep(2, [(0, 1), (0,)])


def _with_another_tensor(shape: tuple[int, ...]) -> Cache:
    cache = DynamicCache()
    cache.update(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), 0)
    layer: Any = cache.layers[0]
    layer.of_another_name = torch.arange(torch.Size(shape).numel()).reshape(shape).float()
    return cache


def test_what_follows_the_slots_under_any_name_is_moved() -> None:
    cache = _with_another_tensor((1, 1, 9, 1))
    slots = StockSlots(cache, torch.arange(5)[None])

    slots.keep(4, [[0, 2]])

    layer: Any = cache.layers[0]
    kept: Tensor = layer.of_another_name
    assert kept[0, 0, :7, 0].tolist() == [0, 1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize("shape", [(1, 1, 5, 9), (1, 9), (2, 1, 9, 1)])
def test_what_follows_no_slots_is_not_moved_by_guess(shape: tuple[int, ...]) -> None:
    cache = _with_another_tensor(shape)
    slots = StockSlots(cache, torch.arange(5)[None])

    assert "of_another_name" in (why_slots_stay(cache) or "")
    with pytest.raises(TargetError, match="of_another_name"):
        slots.keep(4, [[0, 2]])
