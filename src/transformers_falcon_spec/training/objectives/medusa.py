"""The objective of Medusa heads with a frozen target: Medusa-1 (arXiv 2401.10774, section 2.2.1)."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..features import PairBatch, TargetFeatures
from .base import Objective, Outcome, mean_where, token_loss, token_terms

HEAD_DECAY = 0.8  # head k of 1, 2, .. has weight 0.8^k


class MedusaObjective(Objective):
    """The loss is the mean over tokens of the sum over heads k of 0.8^k times 0.9 KL + 0.1 cross-entropy.

    A head that lies before the text has no feature to draft a token from, and adds nothing there.

    The paper trains on the cross-entropy to the tokens of the text. Here every head learns the target's distribution
    for the token that it drafts, computed after the true tokens in between. On text drawn from the target both losses
    have the same mean gradient, and this one less noise. The two terms are those of all other drafters of this
    package, so losses can be compared.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_offsets = int(self.config.num_heads)

    @classmethod
    def read_target(cls, drafter: Any, target: PreTrainedModel) -> TargetFeatures:
        """Labels are those of the first head: the feature one ahead, which predicts the token two ahead."""
        drafter.check_target(target)
        return TargetFeatures(target, drafter.feature_layers, 1)

    def __call__(self, model: nn.Module, pairs: PairBatch, /, *_: Any) -> Outcome:
        """The loss of one batch: head i predicts each label from the feature i + 1 tokens before it."""
        heads = torch.arange(self.num_offsets, device=pairs.is_counted.device)
        rows, labels = pairs.is_counted.nonzero().unbind(-1)
        sources = labels[:, None] - heads  # [counted, heads]: the feature from which each head drafts this token
        is_inside = sources >= 0

        outputs = model(pairs.features[rows[:, None], sources.clamp(min=0)])[is_inside]
        logits = outputs.float() if self.config.has_lm_heads else self.head(outputs)
        counted = pairs.labels[pairs.is_counted]
        guessed = is_inside.nonzero()[:, 0]
        target_logits = self.head(counted)[guessed]
        block_offsets = heads.expand_as(sources)[is_inside]
        losses = token_loss(*token_terms(logits, target_logits))

        terms = {}
        for head in range(self.num_offsets):
            terms[f"token_loss_at_{head + 1}"] = mean_where(losses, block_offsets == head).detach()

        weights = HEAD_DECAY ** (block_offsets + 1).float()
        loss = (weights * losses).sum() / max(len(labels), 1)
        outcome = Outcome(loss, terms, logits, target_logits, block_offsets)
        return outcome if model.training else self.over_vocabulary(outcome, counted[guessed])
