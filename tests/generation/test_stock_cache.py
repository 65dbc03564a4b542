"""What this package relies on in Transformers' caches: keeping a path, forgetting slots, sliding windows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from tests import reference, runs
from tests.core.strategies import few, parent_lists
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.generation.stock_cache import (
    StockSlots,
    drop_last,
    new_cache,
    num_held,
    prepared,
    stop_recording,
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

    slots = StockSlots(cache, torch.arange(num_before)[None])
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


def test_dropping_nothing_shrinks_sliding_layers_to_their_window() -> None:
    cache = _labelled_cache(9)

    drop_last(cache, 0)

    assert _labels(cache, 0) == list(range(9))
    assert _labels(cache, 1) == [6, 7, 8]


def test_a_window_beside_a_recurrent_state_holds_what_leaves_it_until_the_next_crop() -> None:
    stock = LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=WINDOW)
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), stock]
    prepared(cache)

    _read(cache, list(range(6)))
    states = stock.update_conv_state(torch.ones(1, 2, 3)).clone()
    assert _labels(cache, 1) == list(range(6))

    drop_last(cache, 2)
    assert _labels(cache, 1) == _window(list(range(4)))
    assert stock.conv_states[0].equal(states)

    stop_recording(cache)
    assert type(stock) is LinearAttentionAndSlidingWindowAttentionLayer
    assert not stock.record_past


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


def test_held_slots_are_asked_from_the_layer() -> None:
    cache = runs.prefilled(make_target("gemma3"), make_prompt(12)).cache

    assert list(map(num_held, cache.layers)) == [7, 12, 7]
    assert num_held(new_cache(make_target("llama").config).layers[0]) == 0


def test_a_static_cache_is_refused() -> None:
    cache = StaticCache(config=make_target("llama").config, max_cache_len=32)

    with pytest.raises(
        GenerationError, match=r"needs a `DynamicCache`, but the call uses a `StaticCache`\. Leave out"
    ):
        prepared(cache)
