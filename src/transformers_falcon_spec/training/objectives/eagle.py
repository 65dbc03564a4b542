"""The objectives of Eagle drafters: feature prediction, and the training-time test of version 3.

Sources: arXiv 2401.15077, section 4, and arXiv 2503.01840, section 3.
"""

from abc import ABC
from typing import Any

import torch
from torch import Tensor, nn

from ...core.packing import shift_left
from ..features import PairBatch
from ..losses import distillation_loss, token_terms
from .base import Objective, Outcome


class EagleObjective(Objective, ABC):
    """The objective of an Eagle drafter, which depends on its version."""

    @classmethod
    def for_drafter(cls, drafter: Any) -> type[Objective]:
        """The objective of the drafter's version."""
        return FeatureObjective if drafter.config.version == 1 else TrainingTimeTest

    @property
    def num_draft_tokens(self) -> int:
        """The size of the draft vocabulary; the whole vocabulary where there is none."""
        return int(self.config.num_draft_tokens)


class FeatureObjective(EagleObjective):
    """Version 1 learns the next feature and its distribution, from features with noise."""

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:
        """The loss of one pass over the batch."""
        del progress  # training is the same from start to end
        inputs = self.with_noise(pairs, generator) if model.training else pairs
        output = model(inputs.token_embeds, inputs.features, positions=pairs.positions[:, :-1])
        states = output.states[:, 0][pairs.is_counted]
        labels = pairs.labels[pairs.is_counted]
        logits, target_logits = self.features.head(states), self.features.head(labels)
        loss = distillation_loss(states, labels, logits, target_logits)
        total = loss.total(self.args.feature_loss_weight, self.args.token_loss_weight)
        block_offsets = torch.zeros_like(target_logits[:, 0], dtype=torch.long)
        return Outcome(total, vars(loss), logits, target_logits, block_offsets)


class TrainingTimeTest(EagleObjective):
    """Version 3 learns distributions over its draft vocabulary, in several steps on its own states.

    Step j has weight `ttt_decay` to the power j. Its loss is the mean over the guesses for which the target's best
    token can be drafted.
    """

    def __init__(self, drafter: Any, *args: Any) -> None:
        super().__init__(drafter, *args)
        self.num_offsets = self.args.ttt_steps
        self._drafter = drafter

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:
        """The loss of all steps, which are one forward of the model.

        The outcome's logits cover the draft vocabulary in training, else all tokens.
        """
        del generator, progress  # nothing is drawn, and training is the same from start to end
        order = torch.zeros_like(pairs.is_counted, dtype=torch.long)
        order[pairs.is_counted] = torch.arange(int(pairs.is_counted.sum()), device=order.device)
        steps, positions = range(self.num_offsets), pairs.positions[:, :-1]
        is_counted = torch.stack([shift_left(pairs.is_counted, positions, step) for step in steps], dim=1)
        labels = torch.stack([shift_left(order, positions, step) for step in steps], dim=1)[is_counted]
        guess_steps = is_counted.nonzero()[:, 1]
        output = model(pairs.token_embeds, pairs.features, self.num_offsets, is_counted, positions)
        full = self.features.head(pairs.labels[pairs.is_counted])  # [counted tokens of the text, vocab]
        restricted, can_draft = self._restricted(full)
        logits, target_logits = output.logits, restricted[labels]
        divergence, _cross_entropy = token_terms(logits, target_logits)
        by_step = torch.stack([_mean(divergence, can_draft[labels] & (guess_steps == step)) for step in steps])
        weights = self.args.ttt_decay ** torch.arange(self.num_offsets, dtype=torch.float, device=divergence.device)
        terms = {f"divergence_at_{step + 1}": by_step[step] for step in steps}
        if not model.training:
            logits, target_logits = self._to_full_vocabulary(logits, full.shape[-1]), full[labels]
        return Outcome((weights * by_step).sum(), terms, logits, target_logits, guess_steps)

    def _restricted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's logits over the draft vocabulary, and where its best token is in that vocabulary."""
        ids = self._drafter.draft_token_ids
        if ids is None:
            return logits, torch.ones_like(logits[:, 0], dtype=torch.bool)
        ids = ids.to(logits.device)
        return logits[:, ids], torch.isin(logits.argmax(-1), ids)

    def _to_full_vocabulary(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The drafter's logits over the target's vocabulary; tokens that cannot be drafted get minus infinity."""
        ids = self._drafter.draft_token_ids
        if ids is None:
            return logits
        full = logits.new_full((len(logits), vocab_size), -torch.inf)
        return full.index_copy(-1, ids.to(logits.device), logits)


def _mean(values: Tensor, is_counted: Tensor) -> Tensor:
    """The mean of the counted values, or zero if none counts."""
    return (values * is_counted).sum() / is_counted.sum().clamp(min=1)
