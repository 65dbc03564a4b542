"""The terms of distillation losses: feature regression, KL divergence, cross-entropy to the best token."""

from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812  the name everybody knows
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class DistillationLoss:
    """The loss terms of a batch, each a mean over counted rows.

    Source: arXiv 2412.12639, equation 3: L = SmoothL1 + 0.1 * (0.9 * KL + 0.1 * CE). KL is a true divergence at
    temperature 1, and the label of CE is the target's best token.
    """

    regression: Tensor  # SmoothL1 between features, averaged over the hidden size
    divergence: Tensor  # KL(target || drafter)
    cross_entropy: Tensor

    def total(self, feature_weight: float, token_weight: float) -> Tensor:
        """The weighted sum."""
        return feature_weight * self.regression + token_weight * token_loss(self.divergence, self.cross_entropy)


def token_loss(divergence: Tensor, cross_entropy: Tensor) -> Tensor:
    """The weighted sum of the two token terms."""
    return 0.9 * divergence + 0.1 * cross_entropy


def token_terms(
    draft_logits: Float[Tensor, "counted vocab"], target_logits: Float[Tensor, "counted vocab"]
) -> tuple[Float[Tensor, " counted"], Float[Tensor, " counted"]]:
    """The KL divergence and the cross-entropy of each row."""
    draft, target = F.log_softmax(draft_logits, dim=-1), F.log_softmax(target_logits, dim=-1)
    divergence = F.kl_div(draft, target, reduction="none", log_target=True).sum(-1)
    return divergence, F.nll_loss(draft, target_logits.argmax(-1), reduction="none")


def distillation_loss(
    features: Float[Tensor, "counted hidden"],
    labels: Float[Tensor, "counted hidden"],
    draft_logits: Float[Tensor, "counted vocab"],
    target_logits: Float[Tensor, "counted vocab"],
) -> DistillationLoss:
    """The loss terms over counted rows."""
    divergence, cross_entropy = token_terms(draft_logits, target_logits)
    regression = F.smooth_l1_loss(features.float(), labels.float())
    return DistillationLoss(regression, divergence.mean(), cross_entropy.mean())
