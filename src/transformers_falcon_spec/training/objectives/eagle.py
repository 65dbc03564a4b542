"""The objectives of Eagle: the next feature (arXiv 2401.15077, section 4), and the training-time test (arXiv 2503.01840, section 3)."""

from abc import ABC
from typing import Any

import torch
from torch import Tensor, nn

from ...core.packing import shift_left
from ..features import PairBatch
from ..losses import distillation_loss, token_terms
from .base import Objective, Outcome


class EagleObjective(Objective, ABC):
    """What an Eagle drafter learns, by its version."""

    @classmethod
    def of(cls, drafter: Any) -> type[Objective]:
        """The objective of the drafter's version."""
        return FeatureObjective if drafter.config.version == 1 else TrainingTimeTest

    @property
    def num_draft_tokens(self) -> int:
        """Those of its own vocabulary, where it has one."""
        return int(self.config.num_draft_tokens)


class FeatureObjective(EagleObjective):
    """Version 1: the next feature and its distribution, from features with noise."""

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:  # noqa: ARG002
        """One pass over the batch."""
        seen = self.with_noise(pairs, generator) if model.training else pairs
        output = model(seen.token_embeds, seen.features, positions=pairs.positions[:, :-1])
        states = output.states[:, 0][pairs.is_counted]
        labels = pairs.labels[pairs.is_counted]
        logits, wanted = self.features.head(states), self.features.head(labels)
        loss = distillation_loss(states, labels, logits, wanted)
        total = loss.total(self.args.feature_loss_weight, self.args.token_loss_weight)
        return Outcome(total, vars(loss), logits, wanted, torch.zeros_like(wanted[:, 0], dtype=torch.long))


class TrainingTimeTest(EagleObjective):
    """Version 3: distributions alone, over the tokens that can be drafted, in steps that the drafter takes on its own states.

    Step j weighs `ttt_decay` to the power j, and is a mean over its counted places whose best token can be drafted.
    """

    def __init__(self, drafter: Any, *args: Any) -> None:
        super().__init__(drafter, *args)
        self.num_places = self.args.ttt_steps
        self._drafter = drafter

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:  # noqa: ARG002
        """All steps in one forward of the model. In training, logits come over the tokens that can be drafted, else over all."""
        order = torch.zeros_like(pairs.is_counted, dtype=torch.long)
        order[pairs.is_counted] = torch.arange(int(pairs.is_counted.sum()), device=order.device)
        steps, positions = range(self.num_places), pairs.positions[:, :-1]
        is_counted = torch.stack([shift_left(pairs.is_counted, positions, step) for step in steps], dim=1)
        labels = torch.stack([shift_left(order, positions, step) for step in steps], dim=1)[is_counted]
        places = is_counted.nonzero()[:, 1]
        output = model(pairs.token_embeds, pairs.features, self.num_places, is_counted, positions)
        every = self.features.head(pairs.labels[pairs.is_counted])  # [places of the text, vocab]
        restricted, can_draft = self._restricted(every)
        logits, wanted = output.logits, restricted[labels]
        rows, _cross_entropy = token_terms(logits, wanted)
        by_step = torch.stack([_mean(rows, can_draft[labels] & (places == step)) for step in steps])
        weights = self.args.ttt_decay ** torch.arange(self.num_places, dtype=torch.float, device=rows.device)
        terms = {f"divergence_at_{step + 1}": by_step[step] for step in steps}
        if not model.training:
            logits, wanted = self._spread(logits, every.shape[-1]), every[labels]
        return Outcome((weights * by_step).sum(), terms, logits, wanted, places)

    def _restricted(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's logits of the tokens that can be drafted, and where its best token is one of them."""
        ids = self._drafter.draft_token_ids
        if ids is None:
            return logits, torch.ones_like(logits[:, 0], dtype=torch.bool)
        ids = ids.to(logits.device)
        return logits[:, ids], torch.isin(logits.argmax(-1), ids)

    def _spread(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The drafter's logits over the target's vocabulary; what cannot be drafted is infinitely unlikely."""
        ids = self._drafter.draft_token_ids
        if ids is None:
            return logits
        everywhere = logits.new_full((len(logits), vocab_size), -torch.inf)
        return everywhere.index_copy(-1, ids.to(logits.device), logits)


def _mean(values: Tensor, is_counted: Tensor) -> Tensor:
    """Mean of the counted values; zero where none counts."""
    return (values * is_counted).sum() / is_counted.sum().clamp(min=1)
