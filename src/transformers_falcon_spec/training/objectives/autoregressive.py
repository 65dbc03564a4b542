"""The objective of an ordinary small language model: it learns the target's distribution at every assistant token."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...errors import DrafterMismatchError
from ..features import PairBatch, TargetFeatures
from .base import Objective, Outcome, token_outcome


class AutoregressiveObjective(Objective):
    """The loss is the mean of 0.9 KL + 0.1 cross-entropy to the target's distribution, as for all drafters here."""

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
