"""The objectives of Eagle drafters: feature prediction, and the training-time test of version 3.

Sources: arXiv 2401.15077, section 4, and arXiv 2503.01840, section 3.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..features import PairBatch, shift_left
from .base import Objective, Outcome, mean_where, rows_at_once, token_outcome, token_terms, with_regression


class EagleObjective(Objective):
    """Version 1 learns the next feature and its distribution, from features with noise.

    Version 3 learns distributions over its draft vocabulary, in several steps on its own states. Step j has weight
    `ttt_decay` to the power j. Its loss is the mean over the text's tokens of what their guesses add up to; those for
    which the target's best token cannot be drafted add nothing.
    """

    def __init__(self, drafter: Any, *args: Any) -> None:
        super().__init__(drafter, *args)
        self.num_offsets = 1 if drafter.config.version == 1 else self.args.ttt_steps

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, /, *_: Any) -> Outcome:
        """The loss of one batch; in the training of version 3 the outcome's logits cover the draft vocabulary."""
        if self.config.version != 1:
            return self._test_at_training_time(model, pairs)

        inputs = self.with_noise(pairs, generator) if model.training else pairs
        output = model(inputs.token_embeds, inputs.features)
        states = output.states[:, 0][pairs.is_counted]
        labels = pairs.labels[pairs.is_counted]
        outcome = token_outcome(self.head(states), self.head(labels))
        outcome = with_regression(outcome, states, labels, self.args)
        return outcome if model.training else self.over_vocabulary(outcome, labels)

    def _test_at_training_time(self, model: nn.Module, pairs: PairBatch) -> Outcome:
        """The loss of all steps, which are one forward of the model.

        Step j guesses, from token p of the text, the label of token p + j. Labels are numbered in the order in which
        they count.
        """
        numbers = torch.zeros_like(pairs.is_counted, dtype=torch.long)
        numbers[pairs.is_counted] = torch.arange(int(pairs.is_counted.sum()), device=numbers.device)
        counted_by_step = []
        numbers_by_step = []
        for step in range(self.num_offsets):
            counted_by_step.append(shift_left(pairs.is_counted, step))
            numbers_by_step.append(shift_left(numbers, step))

        is_counted = torch.stack(counted_by_step, dim=1)  # [rows, steps, pairs]
        labels = torch.stack(numbers_by_step, dim=1)[is_counted]
        guess_steps = is_counted.nonzero()[:, 1]

        output = model(pairs.token_embeds, pairs.features, self.num_offsets, is_counted)
        logits = output.logits
        counted = pairs.labels[pairs.is_counted]
        target_logits = self.head(counted)[labels]
        can_draft = self._can_draft(counted)[labels]

        divergence, _ = token_terms(logits, target_logits)
        terms = {}
        for step in range(self.num_offsets):
            terms[f"divergence_at_{step + 1}"] = mean_where(divergence, can_draft & (guess_steps == step))

        weights = self.args.ttt_decay ** guess_steps.float()
        loss = (weights * divergence * can_draft).sum() / max(len(counted), 1)

        outcome = Outcome(loss, terms, logits, target_logits, guess_steps)
        if model.training:
            return outcome

        return self.over_vocabulary(outcome, counted[labels])

    def _can_draft(self, states: Float[Tensor, "counted hidden"]) -> Bool[Tensor, " counted"]:
        """Whether the target's best token after each state can be drafted; over all tokens, a few states at a time."""
        ids = self.draft_token_ids
        if ids is None:
            return torch.ones_like(states[:, 0], dtype=torch.bool)

        found = []
        for some in states.split(rows_at_once(self.config.vocab_size, states.device)):
            best = self.features.head(some).argmax(-1)
            found.append(torch.isin(best, ids.to(best.device)))

        return torch.cat(found)
