"""The terms of the loss against loops, one row and one entry at a time."""

import math

import pytest
import torch
from torch import Tensor

from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.objectives import base
from transformers_falcon_spec.training.objectives.base import Outcome, token_outcome, token_terms, with_regression

ROWS, HIDDEN, VOCAB = 5, 6, 7


def softmax(logits: list[float]) -> list[float]:
    total = sum(math.exp(logit) for logit in logits)
    return [math.exp(logit) / total for logit in logits]


def naive_regression(features: list[list[float]], labels: list[list[float]]) -> float:
    """Half the square below a difference of 1, the difference less a half beyond it; mean over width, then rows."""
    total = 0.0
    for row, label in zip(features, labels, strict=True):
        gaps = [abs(a - b) for a, b in zip(row, label, strict=True)]
        total += sum(gap**2 / 2 if gap < 1 else gap - 0.5 for gap in gaps) / len(gaps)
    return total / len(features)


def naive_divergence(draft: list[list[float]], target: list[list[float]]) -> float:
    total = 0.0
    for draft_row, target_row in zip(draft, target, strict=True):
        for ours, theirs in zip(softmax(draft_row), softmax(target_row), strict=True):
            total += theirs * (math.log(theirs) - math.log(ours))
    return total / len(draft)


def naive_cross_entropy(draft: list[list[float]], target: list[list[float]]) -> float:
    total = 0.0
    for draft_row, target_row in zip(draft, target, strict=True):
        total -= math.log(softmax(draft_row)[target_row.index(max(target_row))])
    return total / len(draft)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(width: int) -> Tensor:
        return torch.randn(ROWS, width, generator=generator) * 2

    return {
        "features": draw(HIDDEN),
        "labels": draw(HIDDEN),
        "draft_logits": draw(VOCAB),
        "target_logits": draw(VOCAB),
    }


def outcome_of(batch: dict[str, Tensor], feature_weight: float = 1.0, token_weight: float = 0.1) -> Outcome:
    offsets = torch.zeros(ROWS, dtype=torch.long)
    outcome = token_outcome(batch["draft_logits"], batch["target_logits"], offsets)
    args = DrafterTrainingArguments(
        report_to="none", use_cpu=True, feature_loss_weight=feature_weight, token_loss_weight=token_weight
    )
    return with_regression(outcome, batch["features"], batch["labels"], args)


def test_each_term_is_the_mean_over_rows(batch: dict[str, Tensor]) -> None:
    features, labels, draft, target = (values.tolist() for values in batch.values())

    terms = outcome_of(batch).terms

    assert terms["regression"].item() == pytest.approx(naive_regression(features, labels), rel=1e-5)
    assert terms["divergence"].item() == pytest.approx(naive_divergence(draft, target), rel=1e-5)
    assert terms["cross_entropy"].item() == pytest.approx(naive_cross_entropy(draft, target), rel=1e-5)


def test_a_perfect_drafter_loses_only_the_targets_own_doubt(batch: dict[str, Tensor]) -> None:
    perfect = {**batch, "features": batch["labels"], "draft_logits": batch["target_logits"]}

    terms = outcome_of(perfect).terms

    assert terms["regression"].item() == 0
    assert terms["divergence"].item() == pytest.approx(0, abs=1e-6)
    assert terms["cross_entropy"].item() > 0


def test_the_divergence_is_never_negative(batch: dict[str, Tensor]) -> None:
    near = {
        **batch,
        "draft_logits": batch["target_logits"] * 0.95,
    }  # the reference code's mistake gave less than 0 here

    assert outcome_of(near).terms["divergence"].item() > 0


def test_the_token_terms_of_rows_are_those_of_loops(batch: dict[str, Tensor]) -> None:
    draft, target = batch["draft_logits"], batch["target_logits"]

    found = [term.tolist() for term in token_terms(draft, target)]

    rows = list(zip(draft.tolist(), target.tolist(), strict=True))
    assert found[0] == pytest.approx([naive_divergence([ours], [theirs]) for ours, theirs in rows], rel=1e-5)
    assert found[1] == pytest.approx([naive_cross_entropy([ours], [theirs]) for ours, theirs in rows], rel=1e-5)


@pytest.mark.parametrize("num_rows", [0, 1, ROWS])
def test_terms_a_few_rows_at_a_time_are_those_of_all_at_once_and_so_are_their_gradients(
    batch: dict[str, Tensor], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, target = batch["draft_logits"][:num_rows].requires_grad_(), batch["target_logits"][:num_rows]
    pieces: list[int] = []
    whole = base._terms_at_once

    def watched(*logits: Tensor) -> tuple[Tensor, Tensor]:
        pieces.append(len(logits[0]))
        return whole(*logits)

    monkeypatch.setattr(base, "NUMBERS_AT_ONCE", 2 * VOCAB)
    monkeypatch.setattr(base, "_terms_at_once", watched)
    found = token_terms(draft, target)
    assert max(pieces) <= 2
    assert sum(pieces) == num_rows
    (gradient,) = torch.autograd.grad(base.token_loss(*found).sum(), draft)

    expected = whole(draft, target)
    (wanted,) = torch.autograd.grad(base.token_loss(*expected).sum(), draft)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(("feature_weight", "token_weight"), [(1.0, 0.1), (0.0, 1.0), (2.0, 0.0)])
def test_the_total_weighs_the_terms_as_the_paper_does(
    batch: dict[str, Tensor], feature_weight: float, token_weight: float
) -> None:
    outcome = outcome_of(batch, feature_weight, token_weight)

    regression, divergence, cross_entropy = (term.item() for term in outcome.terms.values())
    expected = feature_weight * regression + token_weight * (0.9 * divergence + 0.1 * cross_entropy)
    assert outcome.loss.item() == pytest.approx(expected)


def test_rows_of_later_offsets_weigh_less_by_the_decay(batch: dict[str, Tensor]) -> None:
    draft, target = batch["draft_logits"], batch["target_logits"]

    found = token_outcome(draft, target, torch.tensor([0, 1, 2, 1, 0]), decay=0.5).terms["divergence"].item()

    rows = [naive_divergence([ours], [theirs]) for ours, theirs in zip(draft.tolist(), target.tolist(), strict=True)]
    weighed = rows[0] + rows[1] / 2 + rows[2] / 4 + rows[3] / 2 + rows[4]
    assert found == pytest.approx(weighed / 3.25, rel=1e-5)


def test_gradients_reach_the_drafter_through_every_term(batch: dict[str, Tensor]) -> None:
    batch["features"].requires_grad_()
    batch["draft_logits"].requires_grad_()

    outcome_of(batch).loss.backward()

    assert batch["features"].grad.abs().sum() > 0
    assert batch["draft_logits"].grad.abs().sum() > 0
    assert batch["target_logits"].grad is None
