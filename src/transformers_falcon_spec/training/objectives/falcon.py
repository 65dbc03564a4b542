"""Coupled sequential glancing distillation: the objective of Falcon (arXiv 2412.12639, section 3.2)."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ...core.packing import shift_left, text_numbers
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
        phases = self.phases(num_conversations, generator).to(positions.device)
        wanted = self.features.head(pairs.labels[pairs.is_counted])
        seen = pairs
        if model.training:
            noisy = self.with_noise(pairs, generator)
            seen = self.seen(model, pairs, noisy, wanted, phases, generator, progress)
        predicted = predict(model, seen, phases)
        counted = seen.is_counted
        logits, wanted = self._logits(predicted, pairs, counted), wanted[counted[pairs.is_counted]]
        places = self.places(pairs, phases)[counted]
        total, terms = self.loss(predicted[counted], pairs.labels[counted], logits, wanted, places)
        return Outcome(total, terms, logits, wanted, places)

    def phases(self, num_conversations: int, generator: torch.Generator) -> Int[Tensor, " texts"]:
        """Where the blocks of each conversation start: anywhere, as drafts do."""
        return torch.randint(self.block_size, (num_conversations,), generator=generator)

    def loss(
        self, features: Tensor, labels: Tensor, draft_logits: Tensor, target_logits: Tensor, places: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What is minimised, and its terms, over rows that count, each at a place of its block; shapes as [`distillation_loss`] has them."""
        del places  # all places count alike
        loss = distillation_loss(features, labels, draft_logits, target_logits)
        return loss.total(self.args.feature_loss_weight, self.args.token_loss_weight), vars(loss)

    def places(self, pairs: PairBatch, phases: Tensor) -> Tensor:
        """The place `[rows, pairs]` of each row in its block."""
        positions = pairs.positions[:, :-1]
        return (positions - phases[text_numbers(positions, len(pairs.is_token))]) % self.block_size

    def _logits(self, predicted: Tensor, pairs: PairBatch, counted: Tensor) -> Tensor:
        """What the drafter says of the counted places, each after the text's own token before it."""
        features = predicted[counted]
        logits = self.features.head(features)
        if self.config.transition_rank is None:
            return logits
        before = shift_left(pairs.input_ids, pairs.positions, self.block_size)[:, :-1][counted]
        return logits + self._drafter.transition(before, features.to(self._drafter.dtype)).to(logits)

    def seen(
        self,
        model: nn.Module,
        clean: PairBatch,
        noisy: PairBatch,
        wanted: Tensor,
        phases: Tensor,
        generator: torch.Generator,
        progress: float,
    ) -> PairBatch:
        """What the drafter is trained on. Pass 1 without gradient counts what it gets wrong; part of the truth is then shown for pass 2."""
        if not self.args.use_glancing or self.block_size == 1:
            return noisy
        with torch.no_grad():
            predicted = predict(model, noisy, phases)
            wrong = self._logits(predicted, noisy, noisy.is_counted).argmax(-1) != wanted.argmax(-1)
        budget = glancing_budget(int(wrong.sum()), self.args.glancing_ratio, progress)
        mask = reveal_mask(noisy.is_counted, self.places(noisy, phases), self.block_size, budget, generator)
        return reveal(noisy, clean.features, mask, self.block_size)


def predict(model: nn.Module, pairs: PairBatch, phases: Tensor) -> Tensor:
    """The features `[rows, pairs, hidden]` that the drafter expects a block ahead."""
    return model(pairs.token_embeds, pairs.features, phases, pairs.is_token, pairs.positions[:, :-1])
