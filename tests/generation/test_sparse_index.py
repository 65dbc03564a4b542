"""Targets whose attention keeps the best tokens by an index: ties among them must not change the text."""

from typing import Any

import pytest
import torch

from tests import runs
from tests.doubles import RandomDrafter
from tests.tiny import in_double, make_prompt, make_target
from transformers_falcon_spec.errors import GenerationError


def sparse_target(index_topk: int) -> Any:
    return in_double(make_target("deepseek_v32_sparse", seed=7, index_topk=index_topk))


@pytest.mark.parametrize("seed", [0, 1000, 5000, 9000])
def test_ties_of_the_index_do_not_change_the_text(seed: int) -> None:
    target = sparse_target(16)

    pair = runs.told(target, RandomDrafter(12), make_prompt(seed=seed), max_new_tokens=24)

    pair.assert_equal()
    assert "keeps 16 tokens of a text by an index" in " ".join(pair.stats.notes)


def test_drafting_ends_where_the_index_must_choose() -> None:
    short, long = (runs.told(sparse_target(18), RandomDrafter(12), max_new_tokens=num).stats for num in (6, 24))

    assert short.notes == []
    assert short.num_steps < 5
    assert long.num_steps >= short.num_steps + 18  # each further token takes a step


def test_rows_that_may_outgrow_the_index_are_refused_before_anything_is_written() -> None:
    target, prompt = sparse_target(16), torch.cat([make_prompt(), make_prompt(seed=1)])

    runs.told(target, RandomDrafter(12), prompt, max_new_tokens=4).assert_equal()
    with pytest.raises(GenerationError, match=r"at most the 16 tokens .* \(`index_topk`\), but they may grow to 20"):
        runs.drafted(target, RandomDrafter(12), prompt, max_new_tokens=8)
