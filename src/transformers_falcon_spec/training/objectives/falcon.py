"""Coupled sequential glancing distillation: the objective of Falcon (arXiv 2412.12639, section 3.2)."""

from typing import Any

import torch
from torch import Tensor, nn

from ...core.packing import ahead, text_numbers
from ..features import PairBatch
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
        """With `use_glancing` a drafter in training sees the batch twice. Every conversation has a phase of its own."""
        positions = pairs.positions[:, :-1]
        num_conversations = int(text_numbers(positions, len(pairs.is_token))[-1, -1]) + 1
        phases = torch.randint(self.block_size, (num_conversations,), generator=generator).to(positions.device)
        wanted = self.features.head(pairs.labels[pairs.is_counted])
        seen = pairs
        if model.training:
            noisy = self.with_noise(pairs, generator)
            seen = self._glance(model, pairs, noisy, wanted, phases, generator, progress)
        predicted = model(seen.token_embeds, seen.features, phases, seen.is_token, positions)
        counted = seen.is_counted
        logits, wanted = self._logits(predicted, pairs, counted), wanted[counted[pairs.is_counted]]
        loss = distillation_loss(predicted[counted], pairs.labels[counted], logits, wanted)
        total = loss.total(self.args.feature_loss_weight, self.args.token_loss_weight)
        return Outcome(total, vars(loss), logits, wanted, self._places(pairs, phases)[counted])

    def _places(self, pairs: PairBatch, phases: Tensor) -> Tensor:
        """The place `[rows, pairs]` of each row in its block."""
        positions = pairs.positions[:, :-1]
        return (positions - phases[text_numbers(positions, len(pairs.is_token))]) % self.block_size

    def _logits(self, predicted: Tensor, pairs: PairBatch, counted: Tensor) -> Tensor:
        """What the drafter says of the counted places, each after the text's own token before it."""
        features = predicted[counted]
        logits = self.features.head(features)
        if self.config.transition_rank is None:
            return logits
        before = ahead(pairs.input_ids, pairs.positions, self.block_size)[:, :-1][counted]
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
            predicted = model(noisy.token_embeds, noisy.features, phases, noisy.is_token, noisy.positions[:, :-1])
            wrong = self._logits(predicted, noisy, noisy.is_counted).argmax(-1) != wanted.argmax(-1)
        budget = glancing_budget(int(wrong.sum()), self.args.glancing_ratio, progress)
        mask = reveal_mask(noisy.is_counted, self._places(noisy, phases), self.block_size, budget, generator)
        return reveal(noisy, clean.features, mask, self.block_size)
