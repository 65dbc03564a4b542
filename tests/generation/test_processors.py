"""What the loop must know of logits processors before it calls them out of their usual order."""

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from transformers_falcon_spec.generation.processors import read_scores_alone


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
