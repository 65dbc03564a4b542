"""Attention that reads trees: grouped SDPA says what stock SDPA says, and targets are switched to it only while trees are read."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests import runs
from tests.tiny import make_prompt, make_target
from transformers_falcon_spec.generation import tree_attention
from transformers_falcon_spec.generation.tree_attention import GROUPED_SDPA, folded_sdpa, grouped_sdpa


class Layer(torch.nn.Module):
    """What stock SDPA asks of a layer."""

    num_key_value_groups = 2


def _states(num_queries: int, seed: int = 0, value_size: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two rows with four query heads over two groups; every query sees the first slot and every third one after it."""
    rng = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(2, heads, tokens, size, generator=rng)
        for heads, tokens, size in ((4, num_queries, 8), (2, 11, 8), (2, 11, value_size))
    )
    is_seen = (torch.arange(11) + torch.arange(num_queries)[:, None]) % 3 == 0
    is_seen[:, 0] = True
    return query, key, value, torch.zeros(is_seen.shape).masked_fill(~is_seen, -1e30)[None, None]


@pytest.mark.parametrize("num_queries", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("num_threads", [4, 5])  # with two rows and two groups heads are folded up to four
def test_grouped_sdpa_is_stock_sdpa(
    num_queries: int, dtype: torch.dtype, scaling: float | None, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    folded: list[Tensor] = []
    monkeypatch.setattr(tree_attention, "folded_sdpa", lambda *given: folded.append(given[0]) or folded_sdpa(*given))
    states = [part.to(dtype) for part in _states(num_queries)]

    found, weights = grouped_sdpa(Layer(), *states, scaling=scaling)

    expected = sdpa_attention_forward(Layer(), *states, scaling=scaling)[0]
    assert weights is None
    assert found.shape == expected.shape == (2, num_queries, 4, 8)
    assert found.is_contiguous()
    assert len(folded) == (num_threads == 4)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("num_queries", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("kind", ["of one row", "of each row", "of each head", "boolean"])
def test_folded_sdpa_is_stock_sdpa(num_queries: int, dtype: torch.dtype, scaling: float | None, kind: str) -> None:
    query, key, value, mask = _states(num_queries)
    if kind == "of each row":
        mask = torch.cat([mask, mask.roll(1, -1)])
    elif kind == "of each head":
        mask = mask + torch.arange(4)[:, None, None] * torch.arange(11)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask = mask == 0 if kind == "boolean" else mask.to(dtype)

    found = folded_sdpa(query, key, value, mask, scaling=scaling)

    expected = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=scaling)[0]
    torch.testing.assert_close(found.transpose(1, 2), expected)


def test_folding_repeats_neither_keys_nor_values(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, mask = _states(3)
    given: list[Tensor] = []
    monkeypatch.setattr(
        tree_attention.functional,
        "scaled_dot_product_attention",
        lambda *states, **kwargs: given.extend((*states, kwargs["attn_mask"])) or states[0],
    )

    folded_sdpa(query, key, value, mask)

    assert given[0].shape == (2, 2, 6, 8)
    assert given[1] is key
    assert given[2] is value
    assert given[3].shape == (1, 1, 6, 11)


def test_what_is_unusual_is_left_to_stock_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(tree_attention, "sdpa_attention_forward", lambda *_args, **kwargs: given.append(kwargs))
    query, key, value, mask = _states(3)

    grouped_sdpa(Layer(), query, key, value, None)
    grouped_sdpa(Layer(), query, key, value, mask, position_bias=mask)
    grouped_sdpa(Layer(), query, key, value, mask, softcap=30.0)
    grouped_sdpa(Layer(), query, key, value, mask, s_aux=torch.zeros(4))
    grouped_sdpa(Layer(), *_states(3, value_size=4))
    assert [set(kwargs) for kwargs in given] == [set(), {"position_bias"}, {"softcap"}, {"s_aux"}, set()]

    assert grouped_sdpa(Layer(), query, key, value, mask, position_bias=None) is not None
    assert len(given) == 5


@pytest.mark.parametrize(
    ("family", "implementation", "expected"),
    [("llama", "sdpa", GROUPED_SDPA), ("llama", "eager", "eager"), ("gpt_neox", "sdpa", "sdpa")],
)
def test_targets_whose_heads_share_read_trees_with_grouped_sdpa(
    family: str, implementation: str, expected: str
) -> None:
    model, seen = make_target(family, attn_implementation=implementation), []
    target = runs.prefilled(model, make_prompt())
    model.register_forward_pre_hook(lambda *_: seen.append(model.config._attn_implementation))

    runs.tree_logits(target, [5, 6, 7], [-1, 0, 0])

    assert seen == [expected]
    assert model.config._attn_implementation == implementation


def test_trees_are_read_with_an_attention_that_the_caller_put_in_the_place_of_sdpa() -> None:
    model, seen = make_target(), []

    def counting(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[0])
        return sdpa_attention_forward(*args, **kwargs)

    with patch.dict(AttentionInterface._global_mapping, {"sdpa": counting}):
        target = runs.prefilled(model, make_prompt())
        seen.clear()
        runs.tree_logits(target, [5, 6, 7], [-1, 0, 0])

    assert len(seen) == model.config.num_hidden_layers


def test_the_last_of_several_readers_switches_back() -> None:
    model = make_target("llama")
    first, second = ExitStack(), ExitStack()

    first.enter_context(tree_attention.tree_attention(model))
    second.enter_context(tree_attention.tree_attention(model))
    first.close()
    assert model.config._attn_implementation == GROUPED_SDPA
    second.close()

    assert model.config._attn_implementation == "sdpa"


def test_models_that_share_a_config_leave_it_as_it_was() -> None:
    model = make_target("llama")
    other, first, second = type(model)(model.config), ExitStack(), ExitStack()

    first.enter_context(tree_attention.tree_attention(model))
    second.enter_context(tree_attention.tree_attention(other))
    first.close()
    second.close()

    assert model.config._attn_implementation == "sdpa"


def test_an_error_while_reading_switches_back() -> None:
    model = make_target("llama")

    with pytest.raises(KeyError), tree_attention.tree_attention(model):
        raise KeyError

    assert model.config._attn_implementation == "sdpa"
