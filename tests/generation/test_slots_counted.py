"""Targets that count the slots of a cache: Llama 4 scales its queries by them, MiniMax-M3 chooses blocks of them; texts stay theirs."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests import runs
from tests.doubles import InformedDrafter, RandomDrafter
from tests.tiny import in_double, make_prompt, make_target
from transformers_falcon_spec.errors import GenerationError
from transformers_falcon_spec.generation.tree_attention import asks_for_name, tree_attention

LLAMA4: dict[str, Any] = {"floor_scale": 200, "attn_scale": 1.0, "attn_temperature_tuning": True}
LLAMA4 |= {"no_rope_layers": [1, 0, 0]}


def _target(family: str) -> PreTrainedModel:
    if family == "llama4":
        return in_double(make_target(family, seed=3, **LLAMA4))
    return in_double(make_target(family, seed=3))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("family", "prompt_len"), [("llama4", 190), ("minimax_m3", 40), ("minimax_m3", 60)])
def test_a_text_past_the_length_is_the_targets_own(family: str, prompt_len: int, num_rows: int) -> None:
    target = _target(family)
    prompt = torch.cat([make_prompt(prompt_len, seed=row) for row in range(num_rows)])
    gold = runs.plain(target, prompt, max_new_tokens=30).sequences

    pair = runs.both(target, InformedDrafter(RandomDrafter(num_nodes=12), gold), prompt, max_new_tokens=30)

    pair.assert_equal(is_kept=num_rows == 1)
    assert pair.stats.notes
    if (
        num_rows > 1
    ):  # rows keep in step; blocks of slots are read wrongly where rows have other lengths, which the probe sees
        said = " ".join(pair.stats.notes)
        assert "nothing is drafted" in said
        assert family != "llama4" or "rows must keep in step, as the target counts slots of the cache" in said


@pytest.mark.parametrize(("prompt_len", "period"), [(12, 8192), (190, 200)])
def test_fixed_shapes_are_for_texts_that_do_not_reach_the_length(prompt_len: int, period: int) -> None:
    target, prompt = (
        in_double(make_target("llama4", seed=3, **LLAMA4 | {"floor_scale": period})),
        make_prompt(prompt_len),
    )
    gold = runs.plain(target, prompt, max_new_tokens=20).sequences
    drafter = InformedDrafter(RandomDrafter(num_nodes=12), gold)
    drafter.generation_config.capture = True

    if prompt_len > period / 2:
        with pytest.raises(GenerationError, match="but the target counts slots of the cache"):
            runs.drafted(target, drafter, prompt, max_new_tokens=20)
    else:
        runs.both(target, drafter, prompt, max_new_tokens=20).assert_equal()


def test_a_model_that_asks_for_the_name_of_its_attention_keeps_it() -> None:
    asking, other = _target("minimax_m3"), make_target()

    assert asks_for_name(asking)
    assert not asks_for_name(other)
    with tree_attention(asking):
        assert asking.config._attn_implementation == "sdpa"
