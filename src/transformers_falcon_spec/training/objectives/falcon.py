"""Coupled sequential glancing distillation: the objective of Falcon (arXiv 2412.12639, section 3.2)."""

from typing import Any

import torch
from torch import Tensor, nn

from ..features import PairBatch, ahead
from ..losses import distillation_loss
from .base import Objective, Outcome
from .glancing import glancing_budget, reveal, reveal_mask


class FalconObjective(Objective):
    """Features k ahead and their distributions, with part of the truth shown where pass 1 was wrong."""

    def __init__(self, drafter: Any, *args: Any) -> None:
        super().__init__(drafter, *args)
        self._drafter = drafter
        self.num_places = self.block_size = int(self.config.block_size)

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:
        """With `use_glancing` a drafter in training sees the batch twice."""
        phases = torch.randint(self.block_size, (len(pairs.is_token),), generator=generator).to(pairs.is_token.device)
        wanted = self.features.head(pairs.labels[pairs.is_counted])
        seen = pairs
        if model.training:
            noisy = self.with_noise(pairs, generator)
            seen = self._glance(model, pairs, noisy, wanted, phases, generator, progress)
        predicted = model(seen.token_embeds, seen.features, phases, seen.is_token)
        counted = seen.is_counted
        logits, wanted = self._logits(predicted, pairs, counted), wanted[counted[pairs.is_counted]]
        loss = distillation_loss(predicted[counted], pairs.labels[counted], logits, wanted)
        total = loss.total(self.args.feature_loss_weight, self.args.token_loss_weight)
        positions = torch.arange(counted.shape[1], device=counted.device)
        return Outcome(total, vars(loss), logits, wanted, ((positions - phases[:, None]) % self.block_size)[counted])

    def _logits(self, predicted: Tensor, pairs: PairBatch, counted: Tensor) -> Tensor:
        """What the drafter says of the counted places, each after the text's own token before it."""
        features = predicted[counted]
        logits = self.features.head(features)
        if self.config.transition_rank is None:
            return logits
        before = ahead(pairs.input_ids[:, :-1], pairs.input_ids[:, -1:], self.block_size)[counted]
        return logits + self._drafter.transition(before, features.to(self._drafter.dtype)).to(logits)

    def _glance(
        self,
        model: nn.Module,
        clean: PairBatch,
        noisy: PairBatch,
        wanted: Tensor,
        phases: Tensor,
        generator: torch.Generator,
        progress: float,
    ) -> PairBatch:
        """Pass 1 without gradient counts what the drafter gets wrong; part of the truth is then shown for pass 2."""
        if not self.args.use_glancing or self.block_size == 1:
            return noisy
        with torch.no_grad():
            predicted = model(noisy.token_embeds, noisy.features, phases, noisy.is_token)
            wrong = self._logits(predicted, noisy, noisy.is_counted).argmax(-1) != wanted.argmax(-1)
        budget = glancing_budget(int(wrong.sum()), self.args.glancing_ratio, progress)
        mask = reveal_mask(noisy.is_counted, phases, self.block_size, budget, generator)
        return reveal(noisy, clean.features, mask, self.block_size)
