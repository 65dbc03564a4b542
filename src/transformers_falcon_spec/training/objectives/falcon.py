"""The objective of Falcon drafters: coupled sequential glancing distillation (arXiv 2412.12639, section 3.2)."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from ..features import PairBatch, shift_left
from .base import Objective, Outcome, token_outcome, with_regression


class FalconObjective(Objective):
    """A Falcon drafter learns features one block ahead and their distributions.

    With `use_glancing` part of the truth is shown to it, as much as a first pass got wrong. The blocks of each
    conversation start at an offset of its own.
    """

    def __init__(self, drafter: Any, *args: Any) -> None:
        super().__init__(drafter, *args)
        self.block_size = int(self.config.block_size)
        self.num_offsets = self.block_size

    def most_guesses(self, num_tokens: int) -> int:
        """One a token, which has one place in its block."""
        return num_tokens

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:
        """The loss of one batch; with `use_glancing` a drafter in training reads it twice."""
        num_rows, num_pairs = pairs.is_token.shape
        device = pairs.is_token.device
        phases = self.phases(num_rows, generator).to(device)
        offsets = (torch.arange(num_pairs, device=device) - phases[:, None]) % self.block_size
        target_logits = self.head(pairs.labels[pairs.is_counted])

        inputs = self.with_noise(pairs, generator) if model.training else pairs
        if model.training and self.args.use_glancing and self.block_size > 1:
            with torch.no_grad():
                guesses = self._logits(predict(model, inputs, phases), inputs, inputs.is_counted, offsets)

            num_wrong = int((guesses.argmax(-1) != target_logits.argmax(-1)).sum())
            budget = glancing_budget(num_wrong, self.args.glancing_ratio, progress)
            mask = reveal_mask(inputs.is_counted, offsets, self.block_size, budget, generator)
            inputs = reveal(inputs, pairs.features, mask, self.block_size)
            target_logits = target_logits[inputs.is_counted[pairs.is_counted]]

        counted = inputs.is_counted
        predicted = predict(model, inputs, phases)
        logits = self._logits(predicted, pairs, counted, offsets)
        outcome = token_outcome(logits, target_logits, offsets[counted])
        labels = pairs.labels[counted]
        outcome = with_regression(outcome, predicted[counted], labels, self.args)
        return outcome if model.training else self.over_vocabulary(outcome, labels)

    def phases(self, num_conversations: int, generator: torch.Generator) -> Int[Tensor, " texts"]:
        """The random offset at which the first block of each conversation starts, for drafts may start anywhere."""
        return torch.randint(self.block_size, (num_conversations,), generator=generator)

    def _logits(self, predicted: Tensor, pairs: PairBatch, counted: Tensor, offsets: Tensor) -> Tensor:
        """The drafter's logits of the counted rows, each conditioned on the text's own tokens in its block."""
        features = predicted[counted]
        logits = self.head(features)
        if self.config.transition_rank is None:
            return logits

        previous = shift_left(pairs.input_ids, self.block_size)[:, :-1][counted]
        draft_ids = self.drafter.draft_ids
        if draft_ids is not None:
            previous = draft_ids[previous]
        embeds = None if self.config.transition_size is None else self._embeds_before(pairs, counted, offsets)
        return logits + self.drafter.transition(previous, features.to(self.drafter.dtype), embeds).to(logits)

    def _embeds_before(self, pairs: PairBatch, counted: Tensor, offsets: Tensor) -> Tensor:
        """Embeddings `[counted, tokens, embed]` of the tokens before each guess; zeros outside its block."""
        found = []
        num_tokens = min(self.config.transition_tokens, self.block_size)
        for back in reversed(range(num_tokens)):
            embeds = shift_left(pairs.token_embeds, self.block_size - 1 - back)
            found.append((embeds * (offsets >= back)[..., None])[counted])

        return torch.stack(found, dim=1).to(self.drafter.dtype)


def predict(model: nn.Module, pairs: PairBatch, phases: Tensor) -> Tensor:
    """The features `[rows, pairs, hidden]` that the drafter predicts one block ahead."""
    return model(pairs.token_embeds, pairs.features, phases, pairs.is_token)


def glancing_budget(num_mismatches: int, ratio: float, progress: float) -> int:
    """The number of rows to reveal: the errors of pass 1 times a ratio that falls to 0 as `progress` goes to 1."""
    return round(ratio * (1 - progress) * num_mismatches)


def reveal_mask(
    is_counted: Bool[Tensor, "rows pairs"],
    block_offsets: Int[Tensor, "rows pairs"],
    block_size: int,
    num_rows: int,
    generator: torch.Generator,
) -> Bool[Tensor, "rows pairs"]:
    """Choose the rows to reveal: the first 1 to k - 1 rows of random blocks, until `num_rows` rows are chosen.

    Only complete blocks are used, all of whose rows count in the loss.
    """
    mask = torch.zeros_like(is_counted)
    if block_size == 1 or num_rows <= 0 or is_counted.shape[1] < block_size:
        return mask

    is_complete = is_counted.unfold(1, block_size, 1).all(-1)  # [rows, pairs - k + 1]
    starts = (is_complete & (block_offsets[:, : is_complete.shape[1]] == 0)).nonzero().to(generator.device)
    order = torch.randperm(len(starts), generator=generator)
    lengths = torch.randint(1, block_size, (len(starts),), generator=generator)
    is_chosen = lengths.cumsum(0) - lengths < num_rows
    starts = starts[order][is_chosen]
    lengths = lengths[is_chosen]
    for offset in range(block_size - 1):
        rows, first = starts[lengths > offset].unbind(-1)
        mask[rows, first + offset] = True

    return mask


def reveal(pairs: PairBatch, clean_features: Tensor, mask: Bool[Tensor, "rows pairs"], block_size: int) -> PairBatch:
    """Replace both inputs of revealed rows by the noise-free truth one block ahead; these rows no longer count."""
    true_embeds = pairs.token_embeds.roll(-block_size, dims=1)
    true_features = clean_features.roll(-block_size, dims=1)
    return replace(
        pairs,
        token_embeds=torch.where(mask[..., None], true_embeds, pairs.token_embeds),
        features=torch.where(mask[..., None], true_features, pairs.features),
        is_counted=pairs.is_counted & ~mask,
    )
