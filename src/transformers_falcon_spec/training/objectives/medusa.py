"""Heads that each name a token further ahead: the objective of Medusa-1, whose target is frozen (arXiv 2401.10774, section 2.2.1)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import OptionError
from ..features import PairBatch, TargetFeatures
from ..losses import token_loss, token_terms
from .base import Objective, Outcome

HEAD_DECAY = 0.8  # head k of 1, 2, .. counts 0.8^k


class MedusaObjective(Objective):
    """The sum over heads of 0.8^k times the mean of 0.9 KL + 0.1 cross-entropy over the tokens that head k names.

    The paper takes the cross-entropy to the next tokens of the text. Here every head learns the target's distribution at the
    place it drafts, as read after the true tokens in between: on text drawn from the target both have the same mean gradient, and
    this one less noise. The two terms are those of all other drafters of this package, so that losses compare.
    """

    def __init__(self, *args: Any) -> None:
        """Raises [`OptionError`] where the tree is to take more passes than one."""
        super().__init__(*args)
        self.num_places = int(self.config.num_heads)
        if self.args.draft_tree_passes != 1:
            raise OptionError(
                f"All heads draft in one pass, so `draft_tree_passes` must be 1, but it is {self.args.draft_tree_passes}."
            )

    @classmethod
    def read_target(cls, drafter: Any, target: PreTrainedModel) -> TargetFeatures:
        """Labels of the first head: the feature one ahead speaks of the token two ahead."""
        drafter.check_target(target)
        return TargetFeatures(target, drafter.feature_layers, 1)

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:  # noqa: ARG002  nothing is drawn
        """Each label is what head i should say of the feature i + 1 places before it."""
        heads = torch.arange(self.num_places, device=pairs.is_counted.device)
        rows, labels = pairs.is_counted.nonzero().unbind(-1)
        positions = pairs.positions.expand(len(pairs.input_ids), -1)[rows, labels]
        sources = labels[:, None] - heads  # [counted, heads] where each head reads to draft the same token
        is_text = heads <= positions[:, None]  # of the same conversation
        outputs = model(pairs.features[rows[:, None], sources.clamp(min=0)])[is_text]
        logits = outputs.float() if self.config.has_lm_heads else self.features.head(outputs)
        wanted = self.features.head(pairs.labels[pairs.is_counted])[is_text.nonzero()[:, 0]]
        places = heads.expand_as(sources)[is_text]
        losses = self._by_place(token_loss(*token_terms(logits, wanted)), places)
        terms = {f"token_loss_at_{place}": loss for place, loss in enumerate(losses.detach(), start=1)}
        return Outcome((HEAD_DECAY ** (heads + 1).float() * losses).sum(), terms, logits, wanted, places)

    def _by_place(self, losses: Tensor, places: Tensor) -> Tensor:
        """Mean `[heads]` of the losses of each head; 0 where it has none."""
        counts = torch.bincount(places, minlength=self.num_places).clamp(min=1)
        return losses.new_zeros(self.num_places).index_add(0, places, losses) / counts
