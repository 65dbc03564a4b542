"""The interface of training objectives: a batch of pairs goes in, the loss and the drafter's guesses come out.

Below it stand the terms of distillation losses, feature regression, KL divergence and cross-entropy to the best token,
and the plainest objective: that of an ordinary small language model.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...errors import DrafterMismatchError
from ..arguments import DrafterTrainingArguments
from ..features import PairBatch, TargetFeatures

NUMBERS_AT_ONCE = 2**19  # logits; a cache holds what is made of them in float32; 32 times as many on a GPU


@dataclass(frozen=True)
class Outcome:
    """The loss of a batch, and the guesses behind it, one row for each guess that counts."""

    loss: Tensor  # what is minimised
    terms: dict[str, Tensor]  # of the loss, for the log
    draft_logits: Float[Tensor, "counted vocab"]  # the drafter's scores
    target_logits: Float[Tensor, "counted vocab"]  # the target's scores for the same tokens
    block_offsets: Int[Tensor, " counted"]  # how far into the block, or the draft, each guess is, from 0


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
    def draft_token_ids(self) -> Tensor | None:
        """The target's id of each token that the drafter can draft; None where all of them can be."""
        return getattr(self.drafter, "draft_token_ids", None)

    @property
    def num_draftable_tokens(self) -> int:
        """The number of different tokens that the drafter can draft."""
        vocab_size: int = self.features.target.config.get_text_config(decoder=True).vocab_size
        return vocab_size if self.draft_token_ids is None else len(self.draft_token_ids)

    @classmethod
    def read_target(cls, drafter: Any, target: PreTrainedModel) -> TargetFeatures:
        """Features and labels from the target, as this objective needs them.

        Raises:
            [`DrafterMismatchError`]: the drafter does not fit the target.
        """
        drafter.check_target(target)
        own = getattr(drafter, "embed_tokens", None)
        return TargetFeatures(target, drafter.feature_layers, drafter.block_size, own)

    def most_guesses(self, num_tokens: int) -> int:
        """The most guesses in a text of so many tokens, each of which takes logits: one for each token and offset."""
        return num_tokens * self.num_offsets

    @abstractmethod
    def __call__(self, model: nn.Module, pairs: PairBatch, generator: torch.Generator, progress: float, /) -> Outcome:
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

    def head(self, states: Tensor) -> Tensor:
        """The target's logits `[..., draft vocab]` of states, over the tokens that can be drafted."""
        return self.features.head(states, self.draft_token_ids)

    def over_vocabulary(self, outcome: Outcome, labels: Tensor) -> Outcome:
        """The outcome with logits over all of the target's tokens, as evaluation counts them.

        Those that cannot be drafted have no probability. `labels` are the head's inputs of each guess.
        """
        ids = self.draft_token_ids
        if ids is None:
            return outcome

        target_logits = self.features.head(labels)
        nothing = torch.full_like(target_logits, -torch.inf)
        draft_logits = nothing.index_copy(-1, ids.to(nothing.device), outcome.draft_logits.to(nothing))
        return replace(outcome, draft_logits=draft_logits, target_logits=target_logits)

    def with_noise(self, pairs: PairBatch, generator: torch.Generator) -> PairBatch:
        """Add uniform noise to the features: those that a drafter predicts for itself are inexact, too."""
        if not self.args.feature_noise:
            return pairs

        draws = torch.rand(pairs.features.shape, generator=generator, dtype=torch.float).to(pairs.features)
        noise = self.args.feature_noise * (2 * draws - 1)
        return replace(pairs, features=pairs.features + noise)


def token_terms(
    draft_logits: Float[Tensor, "counted vocab"], target_logits: Float[Tensor, "counted vocab"]
) -> tuple[Float[Tensor, " counted"], Float[Tensor, " counted"]]:
    """The divergence KL(target || drafter) of each row, and its cross-entropy to the target's best token.

    A few rows at a time, and once more for the gradients, so that nothing of the size of all logits is made besides
    their gradients.
    """
    num_rows = rows_at_once(draft_logits.shape[-1], draft_logits.device)
    parts = []
    for draft, target in zip(draft_logits.split(num_rows), target_logits.split(num_rows), strict=True):
        parts.append(checkpoint(_terms_at_once, draft, target, use_reentrant=False, preserve_rng_state=False))

    divergences, cross_entropies = zip(*parts, strict=True)
    return torch.cat(divergences), torch.cat(cross_entropies)


def rows_at_once(num_tokens: int, device: torch.device) -> int:
    """How many rows of so many logits are made at a time where those of all would take much memory."""
    most_numbers = NUMBERS_AT_ONCE if device.type == "cpu" else 32 * NUMBERS_AT_ONCE
    return max(most_numbers // num_tokens, 1)


def _terms_at_once(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    draft = functional.log_softmax(draft_logits, dim=-1)
    target = functional.log_softmax(target_logits, dim=-1)
    divergence = functional.kl_div(draft, target, reduction="none", log_target=True).sum(-1)
    cross_entropy = functional.nll_loss(draft, target_logits.argmax(-1), reduction="none")
    return divergence, cross_entropy


def token_loss(divergence: Tensor, cross_entropy: Tensor) -> Tensor:
    """The weighted sum of the two token terms, with the weights of arXiv 2412.12639, equation 3."""
    return 0.9 * divergence + 0.1 * cross_entropy


def mean_where(values: Tensor, is_counted: Tensor) -> Tensor:
    """The mean of the counted values, or zero if none counts."""
    return (values * is_counted).sum() / is_counted.sum().clamp(min=1)


def token_outcome(
    draft_logits: Tensor, target_logits: Tensor, block_offsets: Tensor | None = None, decay: float = 1.0
) -> Outcome:
    """The token loss over counted rows; the weight of a row is `decay` to the power of its block offset, or 1."""
    if block_offsets is None:
        block_offsets = torch.zeros_like(draft_logits[:, 0], dtype=torch.long)

    weights = decay ** block_offsets.float()
    total = weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
    divergences, cross_entropies = token_terms(draft_logits, target_logits)

    divergence = (divergences * weights).sum() / total
    cross_entropy = (cross_entropies * weights).sum() / total
    terms = {"divergence": divergence, "cross_entropy": cross_entropy}
    return Outcome(token_loss(divergence, cross_entropy), terms, draft_logits, target_logits, block_offsets)


def with_regression(outcome: Outcome, features: Tensor, labels: Tensor, args: DrafterTrainingArguments) -> Outcome:
    """Weigh a token loss, and add the regression of features, SmoothL1 averaged over rows and the hidden size."""
    regression = functional.smooth_l1_loss(features.float(), labels.float())
    loss = args.feature_loss_weight * regression + args.token_loss_weight * outcome.loss
    return replace(outcome, loss=loss, terms={"regression": regression, **outcome.terms})


class AutoregressiveObjective(Objective):
    """An ordinary small language model learns the target's distribution at every assistant token.

    The loss is the mean of 0.9 KL + 0.1 cross-entropy to the target's distribution, as for all drafters here.
    """

    has_draft_tree = False

    @classmethod
    def read_target(cls, drafter: Any, target: PreTrainedModel) -> TargetFeatures:
        """Labels are the inputs of the target's head at the same tokens.

        The models need to share nothing but the vocabulary.

        Raises:
            [`DrafterMismatchError`]: the vocabularies differ in size.
        """
        size = drafter.config.get_text_config(decoder=True).vocab_size
        wanted = target.config.get_text_config(decoder=True).vocab_size
        if size != wanted:
            raise DrafterMismatchError(
                f"A draft model must have the target's vocabulary of size {wanted}, but it has one of size {size}."
            )

        return TargetFeatures(target, (-1,), 0)

    def __call__(self, model: nn.Module, pairs: PairBatch, /, *_: Any) -> Outcome:
        """The loss of one batch.

        Padding is on the right, where no token sees it, so no mask is needed.
        """
        output = model(input_ids=pairs.input_ids[:, :-1], use_cache=False)
        logits = output.logits[pairs.is_counted].float()
        return token_outcome(logits, self.features.head(pairs.labels[pairs.is_counted]))
