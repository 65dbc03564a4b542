"""What the loop must know of logits processors before it calls them out of their usual order."""

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from transformers_falcon_spec.core.verification import AcceptedPath
from transformers_falcon_spec.generation.processors import RowCriteria, possible_ends, read_scores_alone
from transformers_falcon_spec.generation.sequence_batch import SequenceBatch


class Cooling(TemperatureLogitsWarper):
    """A temperature that falls with the length of the text."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * input_ids.shape[1]


def test_processors_of_transformers_that_read_scores_alone_are_known() -> None:
    warpers = [TemperatureLogitsWarper(0.5), TopKLogitsWarper(3)]

    assert read_scores_alone(LogitsProcessorList(warpers))
    assert not read_scores_alone(LogitsProcessorList([*warpers, RepetitionPenaltyLogitsProcessor(1.1)]))


def test_a_subclass_of_a_warper_may_look_at_the_text() -> None:
    cooling = Cooling(0.5)

    assert not cooling(torch.zeros(1, 3).long(), torch.ones(1, 2)).equal(
        cooling(torch.zeros(1, 4).long(), torch.ones(1, 2))
    )
    assert not read_scores_alone(LogitsProcessorList([cooling]))


class LikeAnEnd(EosTokenCriteria):
    """A subclass, which may do anything when it is asked."""


class SilentScores:
    """Stands for the scores of a row that draws nothing."""

    def settle_draws(self, node: int) -> None:
        pass

    def is_settled(self, node: int) -> bool:
        return True


class Counting(StoppingCriteria):
    """Ends nothing, and counts how often it is asked."""

    num_asked = 0

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        self.num_asked += 1
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_rows_may_end_at_the_length_and_after_the_tokens_that_criteria_name() -> None:
    criteria = [MaxLengthCriteria(40, 30), EosTokenCriteria([7, 9]), EosTokenCriteria(torch.tensor(5))]

    assert possible_ends(StoppingCriteriaList(criteria)) == (30, {5, 7, 9})  # behind 30 tokens the first one warns
    assert possible_ends(StoppingCriteriaList([MaxLengthCriteria(20)])) == (20, set())


@pytest.mark.parametrize("other", [MaxTimeCriteria(9.0), LikeAnEnd(7), RowCriteria([bool]), Counting()])
def test_criteria_that_may_end_a_row_anywhere_are_always_asked(other: StoppingCriteria) -> None:
    assert possible_ends(StoppingCriteriaList([MaxLengthCriteria(40), other]))[0] == 0


@pytest.mark.parametrize(("token_ids", "kept"), [((5, 6, 7, 8), 3), ((5, 6, 8, 8, 8, 8), 5), ((5, 6), 2)])
def test_a_row_ends_with_the_first_token_after_which_its_criteria_say_so(
    token_ids: tuple[int, ...], kept: int
) -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(8), EosTokenCriteria([7])])
    config = GenerationConfig()
    config._pad_token_tensor = torch.tensor(0)
    batch = SequenceBatch(torch.tensor([[7, 7, 7]]), None, LogitsProcessorList(), criteria, config)
    path = AcceptedPath(tuple(range(len(token_ids))), token_ids)

    emitted = batch.emit({0: path}, [SilentScores()])

    assert emitted[0].token_ids == token_ids[:kept]
    assert batch.rows[0].input_ids.tolist() == [[7, 7, 7, *token_ids[:kept]]]
    assert batch.has_ended(0) == (kept > 2)


def test_a_criterion_of_the_callers_is_asked_after_every_token() -> None:
    counting = Counting()
    config = GenerationConfig()
    criteria = StoppingCriteriaList([MaxLengthCriteria(9), counting])
    batch = SequenceBatch(torch.tensor([[7]]), None, LogitsProcessorList(), criteria, config)

    batch.emit({0: AcceptedPath((0, 1, 2), (4, 5, 6))}, [SilentScores()])

    assert counting.num_asked == 3
