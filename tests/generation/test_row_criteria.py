"""Stopping criteria that say which row they are for: plain decoding's text, and rows that need not wait for one another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList

from tests import runs
from tests.batches import LENGTHS, Prompts, batch_and_drafted
from tests.doubles import RandomDrafter
from tests.tiny import make_target
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.processors import RowCriteria


@pytest.mark.parametrize("has_eos", [False, True])
def test_criteria_of_rows_end_each_row_by_itself_and_let_rows_grow_at_their_own_pace(has_eos: bool) -> None:
    target, lengths, seen = make_target().double(), (5, 17, 24, 1), []

    def ends_after(row: int) -> Callable[[torch.Tensor], bool]:
        def is_end(ids: torch.Tensor) -> bool:
            seen.append((row, len(ids) - max(LENGTHS)))
            return seen[-1][1] >= lengths[row]

        return is_end

    criteria = StoppingCriteriaList([RowCriteria([ends_after(row) for row in range(4)])])
    options = {"eos_token_id": [3]} if has_eos else {}

    pair = batch_and_drafted(target, stopping_criteria=criteria, **options)

    pair.assert_equal()
    new = pair.drafted.sequences[:, max(LENGTHS) :].tolist()
    assert [row[num:] for row, num in zip(new, lengths, strict=True)] == [[0] * (24 - num) for num in lengths]
    of_drafted = seen[seen.index((0, 1), 1) :]  # behind the calls of plain decoding
    assert [num for row, num in of_drafted if row == 2] == list(range(1, 25))
    assert [num for _, num in of_drafted] != sorted(num for _, num in of_drafted)  # in lockstep they would be


class EndsAnyRow(RowCriteria):
    """One that asks nobody."""

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 15)


def test_one_of_a_kind_of_its_own_is_asked_itself() -> None:
    criteria = StoppingCriteriaList([EndsAnyRow([lambda _: False])])

    pair = runs.both(make_target().double(), RandomDrafter(), stopping_criteria=criteria)

    pair.assert_equal(is_kept=False)
    assert pair.plain.sequences.shape[1] == 15


@pytest.mark.parametrize("assistant", [None, RandomDrafter()])
def test_criteria_of_another_number_of_rows_are_refused(assistant: Any) -> None:
    prompts = Prompts.of()
    criteria = StoppingCriteriaList([RowCriteria([lambda _: False])])

    with pytest.raises(OptionError, match="it holds 1 for 4 rows"):
        make_target().generate(
            prompts.ids,
            attention_mask=prompts.mask,
            assistant_model=assistant,
            stopping_criteria=criteria,
            max_new_tokens=4,
        )
