"""The shape of an objective: a batch of pairs goes in, a loss and what was guessed come out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..arguments import DrafterTrainingArguments
from ..features import PairBatch, TargetFeatures


@dataclass(frozen=True)
class Outcome:
    """The loss of a batch, and the guesses behind it, one row for each counted place.

    Args:
        loss (`torch.Tensor`): What is minimised.
        terms (`dict[str, Tensor]`): Its terms, for the log.
        draft_logits (`torch.Tensor` of shape `(counted, vocab)`): What the drafter says.
        target_logits (`torch.Tensor` of shape `(counted, vocab)`): What the target says there.
        places (`torch.Tensor` of shape `(counted,)`): Which place of a draft each row stands for, counted from 0.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    draft_logits: Float[Tensor, "counted vocab"]
    target_logits: Float[Tensor, "counted vocab"]
    places: Int[Tensor, " counted"]


class Objective(ABC):
    """What one kind of drafter learns. One object serves one trainer.

    Args:
        drafter ([`~transformers.PreTrainedModel`]): The drafter, bare.
        features ([`TargetFeatures`]): The target's side; its `head` makes logits of head inputs.
        args ([`DrafterTrainingArguments`]): Weights of the losses and the like.
    """

    num_places: int = 1  # of a draft, each with an accuracy of its own
    has_draft_tree: bool = True  # whether the drafter drafts a static tree, which can be fitted
    reads_packed: ClassVar[bool] = True  # whether rows may hold several conversations
    generate_options: ClassVar[Mapping[str, Any]] = {}  # what `generate` must be told beside the drafter

    def __init__(self, drafter: PreTrainedModel, features: TargetFeatures, args: DrafterTrainingArguments) -> None:
        self.config: Any = drafter.config
        self.features, self.args = features, args

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the drafter can draft."""
        return int(self.config.vocab_size)

    @classmethod
    def of(cls, drafter: Any) -> type["Objective"]:  # noqa: ARG003  subclasses look at it
        """The objective of this drafter, where a kind of drafter has several."""
        return cls

    @classmethod
    def read_target(cls, drafter: Any, target: PreTrainedModel) -> TargetFeatures:
        """The target's side as this objective needs it.

        Raises:
            [`DrafterMismatchError`]: the target is not one for this drafter.
        """
        drafter.check_target(target)
        return TargetFeatures(target, drafter.feature_layers, drafter.block_size)

    @abstractmethod
    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float) -> Outcome:
        """The outcome of one batch.

        Args:
            model (`nn.Module`): The drafter as the Trainer wraps it; in training mode or not.
            pairs ([`PairBatch`]): The batch.
            generator (`torch.Generator`): All draws come from here; it depends on seed and step alone.
            progress (`float`): How much of the training is done, 0 to 1.
        """

    def with_noise(self, pairs: PairBatch, generator: torch.Generator) -> PairBatch:
        """Uniform noise on the input features: what a drafter feeds itself in later passes is not exact either."""
        if not self.args.feature_noise:
            return pairs
        noise = torch.rand(pairs.features.shape, generator=generator, dtype=torch.float).to(pairs.features) * 2 - 1
        return replace(pairs, features=pairs.features + self.args.feature_noise * noise)
