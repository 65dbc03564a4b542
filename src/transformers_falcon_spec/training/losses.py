"""The terms of distillation losses: feature regression, KL divergence, cross-entropy to the best token."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody knows
from jaxtyping import Float, Int
from torch import Tensor

from .arguments import DrafterTrainingArguments


@dataclass(frozen=True)
class Outcome:
    """The loss of a batch, and the guesses behind it, one row for each guess that counts."""

    loss: Tensor  # what is minimised
    terms: dict[str, Tensor]  # of the loss, for the log
    draft_logits: Float[Tensor, "counted vocab"]  # the drafter's scores
    target_logits: Float[Tensor, "counted vocab"]  # the target's scores for the same tokens
    block_offsets: Int[Tensor, " counted"]  # how far into the block, or the draft, each guess is, from 0


def token_terms(
    draft_logits: Float[Tensor, "counted vocab"], target_logits: Float[Tensor, "counted vocab"]
) -> tuple[Float[Tensor, " counted"], Float[Tensor, " counted"]]:
    """The divergence KL(target || drafter) of each row, and its cross-entropy to the target's best token."""
    draft = F.log_softmax(draft_logits, dim=-1)
    target = F.log_softmax(target_logits, dim=-1)
    divergence = F.kl_div(draft, target, reduction="none", log_target=True).sum(-1)
    cross_entropy = F.nll_loss(draft, target_logits.argmax(-1), reduction="none")
    return divergence, cross_entropy


def token_loss(divergence: Tensor, cross_entropy: Tensor) -> Tensor:
    """The weighted sum of the two token terms, with the weights of arXiv 2412.12639, equation 3."""
    return 0.9 * divergence + 0.1 * cross_entropy


def mean_where(values: Tensor, is_counted: Tensor) -> Tensor:
    """The mean of the counted values, or zero if none counts."""
    return (values * is_counted).sum() / is_counted.sum().clamp(min=1)


def token_outcome(
    draft_logits: Tensor, target_logits: Tensor, block_offsets: Tensor | None = None, decay: float = 1.0
) -> Outcome:
    """The token loss over counted rows; the weight of a row is `decay` to the power of its block offset, or 1."""
    if block_offsets is None:
        block_offsets = torch.zeros_like(draft_logits[:, 0], dtype=torch.long)
    weights = decay ** block_offsets.float()
    total = weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    divergences, cross_entropies = token_terms(draft_logits, target_logits)

    divergence = (divergences * weights).sum() / total
    cross_entropy = (cross_entropies * weights).sum() / total
    terms = {"divergence": divergence, "cross_entropy": cross_entropy}
    return Outcome(token_loss(divergence, cross_entropy), terms, draft_logits, target_logits, block_offsets)


def with_regression(outcome: Outcome, features: Tensor, labels: Tensor, args: DrafterTrainingArguments) -> Outcome:
    """Weigh a token loss, and add the regression of features, SmoothL1 averaged over rows and the hidden size."""
    regression = F.smooth_l1_loss(features.float(), labels.float())
    loss = args.feature_loss_weight * regression + args.token_loss_weight * outcome.loss
    return replace(outcome, loss=loss, terms={"regression": regression, **outcome.terms})
