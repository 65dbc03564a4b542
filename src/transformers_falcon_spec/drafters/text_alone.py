"""Drafters that read text alone: nothing of the target but its vocabulary must fit them."""

from transformers import PreTrainedModel

from .base import DrafterModel


class TextDrafter(DrafterModel):
    """Base of the drafters that read no hidden state of the target."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """None: text alone is read."""
        return ()

    @property
    def feature_size(self) -> int:
        """Nothing of the target is read."""
        return 0

    def sizes_beside(self, model: PreTrainedModel) -> dict[str, tuple[int, int]]:
        """The vocabulary that the drafter was made for, beside that of a target."""
        return {"a vocabulary": (self.config.vocab_size, model.config.get_text_config(decoder=True).vocab_size)}
