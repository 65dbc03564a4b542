"""Static trees: the target's ids of drafted tokens, also where a draft model is spread over several devices."""

from types import SimpleNamespace
from typing import Any

import torch

from transformers_falcon_spec.drafters.medusa import MedusaCandidateGenerator
from transformers_falcon_spec.generation.drafting import DraftBudget

LIST = torch.tensor([1, 3, 4])  # on the CPU, whereas logits are on the device "meta"


def generator() -> Any:
    """A generator that can draft three of eight tokens, and nothing else of it."""
    made = MedusaCandidateGenerator.__new__(MedusaCandidateGenerator)
    made.draft_token_ids, made.target = LIST, SimpleNamespace(vocab_size=8)  # type: ignore[assignment]
    return made


def test_the_list_of_draft_tokens_may_lie_on_another_device_than_logits() -> None:
    probs, ids = torch.ones(1, 2, 3, device="meta"), torch.zeros(1, 2, dtype=torch.long, device="meta")
    budget = DraftBudget((4,), 8, noise=lambda _row, _depth: torch.ones(8, device="meta"))

    over_target, target_ids = generator().over_target_ids(probs), generator().target_ids(ids)
    scores = generator().scores(torch.ones(1, 1, 2, 3, device="meta"), budget, 0)

    assert {over_target.device.type, target_ids.device.type, scores.device.type} == {"meta"}
    assert [each.shape for each in (over_target, target_ids, scores)] == [(1, 2, 8), (1, 2), (1, 1, 2, 3)]


def test_probabilities_and_ids_are_those_of_the_listed_tokens() -> None:
    probs = torch.tensor([[0.2, 0.3, 0.5]])

    assert generator().over_target_ids(probs).tolist() == [[0, probs[0, 0], 0, probs[0, 1], probs[0, 2], 0, 0, 0]]
    assert generator().target_ids(torch.tensor([[2, 0]])).tolist() == [[4, 1]]
