"""The objective of Falcon drafters: coupled sequential glancing distillation (arXiv 2412.12639, section 3.2)."""

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
    """A Falcon drafter learns features one block ahead and their distributions.

    With `use_glancing` part of the truth is shown to it, as much as a first pass got wrong.
    """

    def __init__(self, drafter: Any, *args: Any) -> None:
        super().__init__(drafter, *args)
        self._drafter = drafter
        self.num_offsets = self.block_size = int(self.config.block_size)

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:
        """The loss of one batch.

        Each conversation has its own phase; with `use_glancing` a drafter in training reads the batch twice.
        """
        positions = pairs.positions[:, :-1]
        num_conversations = int(text_numbers(positions, len(pairs.is_token))[-1, -1]) + 1
        phases = self.phases(num_conversations, generator).to(positions.device)
        target_logits = self.features.head(pairs.labels[pairs.is_counted])
        inputs = pairs
        if model.training:
            noisy = self.with_noise(pairs, generator)
            inputs = self.training_inputs(model, pairs, noisy, target_logits, phases, generator, progress)
        predicted = predict(model, inputs, phases)
        counted = inputs.is_counted
        logits, target_logits = self._logits(predicted, pairs, counted), target_logits[counted[pairs.is_counted]]
        offsets = self.block_offsets(pairs, phases)[counted]
        total, terms = self.loss(predicted[counted], pairs.labels[counted], logits, target_logits, offsets)
        return Outcome(total, terms, logits, target_logits, offsets)

    def phases(self, num_conversations: int, generator: torch.Generator) -> Int[Tensor, " texts"]:
        """The random offset at which the first block of each conversation starts, for drafts may start anywhere."""
        return torch.randint(self.block_size, (num_conversations,), generator=generator)

    def loss(
        self, features: Tensor, labels: Tensor, draft_logits: Tensor, target_logits: Tensor, block_offsets: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its terms over counted rows, as in [`distillation_loss`], given their block offsets."""
        del block_offsets  # all offsets have the same weight; subclasses may differ
        loss = distillation_loss(features, labels, draft_logits, target_logits)
        return loss.total(self.args.feature_loss_weight, self.args.token_loss_weight), vars(loss)

    def block_offsets(self, pairs: PairBatch, phases: Tensor) -> Tensor:
        """The offset `[rows, pairs]` of each pair in its block."""
        positions = pairs.positions[:, :-1]
        return (positions - phases[text_numbers(positions, len(pairs.is_token))]) % self.block_size

    def _logits(self, predicted: Tensor, pairs: PairBatch, counted: Tensor) -> Tensor:
        """The drafter's logits of the counted rows, each conditioned on the text's own previous token."""
        features = predicted[counted]
        logits = self.features.head(features)
        if self.config.transition_rank is None:
            return logits
        previous = shift_left(pairs.input_ids, pairs.positions, self.block_size)[:, :-1][counted]
        return logits + self._drafter.transition(previous, features.to(self._drafter.dtype)).to(logits)

    def training_inputs(
        self,
        model: nn.Module,
        clean: PairBatch,
        noisy: PairBatch,
        target_logits: Tensor,
        phases: Tensor,
        generator: torch.Generator,
        progress: float,
    ) -> PairBatch:
        """The drafter's inputs in training: noisy ones, with part of the truth revealed for errors of a first pass."""
        if not self.args.use_glancing or self.block_size == 1:
            return noisy
        with torch.no_grad():
            predicted = predict(model, noisy, phases)
            wrong = self._logits(predicted, noisy, noisy.is_counted).argmax(-1) != target_logits.argmax(-1)
        budget = glancing_budget(int(wrong.sum()), self.args.glancing_ratio, progress)
        mask = reveal_mask(noisy.is_counted, self.block_offsets(noisy, phases), self.block_size, budget, generator)
        return reveal(noisy, clean.features, mask, self.block_size)


def predict(model: nn.Module, pairs: PairBatch, phases: Tensor) -> Tensor:
    """The features `[rows, pairs, hidden]` that the drafter predicts one block ahead."""
    return model(pairs.token_embeds, pairs.features, phases, pairs.is_token, pairs.positions[:, :-1])
