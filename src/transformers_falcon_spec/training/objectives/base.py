"""The interface of training objectives: a batch of pairs goes in, the loss and the drafter's guesses come out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..arguments import DrafterTrainingArguments
from ..features import PairBatch, TargetFeatures
from ..losses import Outcome


class Objective(ABC):
    """The training objective of one kind of drafter. Each trainer has an object of its own.

    Args:
        drafter ([`~transformers.PreTrainedModel`]): The drafter, without the wrappers of the Trainer.
        features ([`TargetFeatures`]): Features and labels from the target; its `head` turns labels into logits.
        args ([`DrafterTrainingArguments`]): Weights of the loss terms and other options.
    """

    num_offsets: int = 1  # block offsets; evaluation reports an accuracy for each
    has_draft_tree: bool = True  # whether the drafter has a static tree, which can be fitted
    generate_options: ClassVar[Mapping[str, Any]] = {}  # options that `generate` needs along with the drafter

    def __init__(self, drafter: PreTrainedModel, features: TargetFeatures, args: DrafterTrainingArguments) -> None:
        self.drafter: Any = drafter
        self.config: Any = drafter.config
        self.features = features
        self.args = args

    @property
    def num_draftable_tokens(self) -> int:
        """The number of different tokens that the drafter can draft."""
        return int(self.config.vocab_size)

    @classmethod
    def read_target(cls, drafter: Any, target: PreTrainedModel) -> TargetFeatures:
        """Features and labels from the target, as this objective needs them.

        Raises:
            [`DrafterMismatchError`]: the drafter does not fit the target.
        """
        drafter.check_target(target)
        own = getattr(drafter, "embed_tokens", None)
        return TargetFeatures(target, drafter.feature_layers, drafter.block_size, own)

    @abstractmethod
    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:
        """Compute the loss of one batch.

        Args:
            model (`nn.Module`): The drafter as the Trainer wraps it, in training or evaluation mode.
            pairs ([`PairBatch`]): The batch.
            generator (`torch.Generator`): The source of all random draws; it depends on seed and step only.
            progress (`float`): The share of the training that is done, 0 to 1.
        """

    def weight(self, is_counted: Bool[Tensor, "rows pairs"]) -> int:
        """How much a batch weighs in the mean over several: the number of its labels that count."""
        return int(is_counted.sum())

    def target_logits(self, pairs: PairBatch) -> Tensor:
        """The target's logits `[counted, vocab]` for the labels that count."""
        return self.features.head(pairs.labels[pairs.is_counted])

    def with_noise(self, pairs: PairBatch, generator: torch.Generator) -> PairBatch:
        """Add uniform noise to the features: those that a drafter predicts for itself are inexact, too."""
        if not self.args.feature_noise:
            return pairs

        draws = torch.rand(pairs.features.shape, generator=generator, dtype=torch.float).to(pairs.features)
        noise = self.args.feature_noise * (2 * draws - 1)
        return replace(pairs, features=pairs.features + noise)
