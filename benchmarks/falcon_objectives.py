"""What a Falcon drafter might have been trained on instead: objectives of `benchmarks/recipe_ablation.py`, which the package does not offer.

Command: python -m benchmarks.falcon_objectives reverse_kl train --target TARGET --data answered.jsonl --output_dir FOLDER
Hardware and time: those of the run. The first word names the objective, the rest is a command of `falcon-spec`, done with that objective
in place of Falcon's own.
"""

import sys
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from transformers_falcon_spec import cli
from transformers_falcon_spec.drafters.registry import METHODS
from transformers_falcon_spec.training.features import PairBatch
from transformers_falcon_spec.training.losses import token_loss, token_terms
from transformers_falcon_spec.training.objectives.base import Outcome
from transformers_falcon_spec.training.objectives.falcon import FalconObjective, predict

OWN_SHARE = 0.25  # of the blocks that are fed what the drafter expected there


class FixedPhase(FalconObjective):
    """Blocks always start at a multiple of k, in training and when judged, not anywhere."""

    def phases(self, num_conversations: int, generator: torch.Generator) -> Tensor:
        """Zero for all."""
        del generator
        return torch.zeros(num_conversations, dtype=torch.long)


class HeldGlancing(FalconObjective):
    """As much of the truth is shown at the end of the training as at its start."""

    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:
        """The outcome at the start of the schedule."""
        del progress
        return super().__call__(model, pairs, generator, 0.0)


class TokenLoss(FalconObjective):
    """Another loss of the tokens beside the feature regression."""

    def loss(
        self, features: Tensor, labels: Tensor, draft_logits: Tensor, target_logits: Tensor, places: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Both, weighed by the options of the run."""
        regression = functional.smooth_l1_loss(features.float(), labels.float())
        tokens = self.token_rows(draft_logits, target_logits, places).mean()
        total = self.args.feature_loss_weight * regression + self.args.token_loss_weight * tokens
        return total, {"regression": regression, "tokens": tokens}

    @abstractmethod
    def token_rows(self, draft_logits: Tensor, target_logits: Tensor, places: Tensor) -> Tensor:
        """The loss of each row `[counted]`."""


class ForwardDivergence(TokenLoss):
    """KL(target || drafter) alone."""

    def token_rows(self, draft_logits: Tensor, target_logits: Tensor, places: Tensor) -> Tensor:
        """Its rows."""
        del places
        return token_terms(draft_logits, target_logits)[0]


class CrossEntropy(TokenLoss):
    """The target's best token alone."""

    def token_rows(self, draft_logits: Tensor, target_logits: Tensor, places: Tensor) -> Tensor:
        """Its rows."""
        del places
        return token_terms(draft_logits, target_logits)[1]


class ReverseDivergence(TokenLoss):
    """KL(drafter || target): what the drafter says must be likely, not all that is likely be said."""

    def token_rows(self, draft_logits: Tensor, target_logits: Tensor, places: Tensor) -> Tensor:
        """Its rows."""
        del places
        return token_terms(target_logits, draft_logits)[0]


class ByReach(TokenLoss):
    """The usual loss, a place weighing as much as its chance to be reached: the mean overlap of all places before it, multiplied."""

    def token_rows(self, draft_logits: Tensor, target_logits: Tensor, places: Tensor) -> Tensor:
        """Its rows, of mean weight 1."""
        reach = self.reach(draft_logits.detach(), target_logits, places)[places]
        return token_loss(*token_terms(draft_logits, target_logits)) * reach / reach.mean()

    def reach(self, draft_logits: Tensor, target_logits: Tensor, places: Tensor) -> Tensor:
        """The chance of each place `[k]`, as this batch has it."""
        overlap = torch.minimum(draft_logits.softmax(-1), target_logits.softmax(-1)).sum(-1)
        sums = torch.zeros(self.block_size, device=overlap.device).index_add(0, places, overlap)
        means = sums / places.bincount(minlength=self.block_size).clamp(min=1)
        return torch.cat([torch.ones_like(means[:1]), means[:-1].cumprod(0)])


class OwnFeatures(FalconObjective):
    """A training-time test: random blocks read the features that the drafter expected there, as its second pass does; rows of one text each."""

    def seen(
        self, model: nn.Module, clean: PairBatch, noisy: PairBatch, wanted: Tensor, phases: Tensor,
        generator: torch.Generator, progress: float,
    ) -> PairBatch:  # fmt: skip
        """The noisy batch, with features of a pass without gradient in blocks that are drawn."""
        del clean, wanted, progress
        size, num_pairs = self.block_size, noisy.features.shape[1]
        with torch.no_grad():
            expected = predict(model, noisy, phases).roll(size, dims=1).to(noisy.features)
        numbers = (torch.arange(num_pairs)[None] + (size - phases.cpu())[:, None]) // size  # of each row's block
        is_drawn = torch.rand(len(phases), int(numbers.max()) + 1, generator=generator) < OWN_SHARE
        is_own = is_drawn.gather(1, numbers) & (torch.arange(num_pairs) >= size)
        return replace(noisy, features=expected.where(is_own[..., None].to(expected.device), noisy.features))


VARIANTS: dict[str, type[FalconObjective]] = {
    "fixed_phase": FixedPhase,
    "held_glancing": HeldGlancing,
    "forward_kl": ForwardDivergence,
    "cross_entropy": CrossEntropy,
    "reverse_kl": ReverseDivergence,
    "by_reach": ByReach,
    "own_features": OwnFeatures,
}


def main(argv: list[str]) -> Any:
    """Put the objective in, and do the command."""
    if not argv or argv[0] not in VARIANTS:
        sys.exit(f"{__doc__}\nThe first word must be one of {', '.join(VARIANTS)}.")
    METHODS["falcon"] = replace(METHODS["falcon"], objective=VARIANTS[argv[0]])
    return cli.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
