"""The Lookahead drafter as a model: options and no weights; the target itself does the work."""

from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import CheckpointError, DrafterMismatchError, OptionError
from ...generation.model_parts import named
from ..base import TextDrafter
from .configuration_lookahead import SMALLEST, LookaheadConfig
from .generator import LookaheadCandidateGenerator


class LookaheadDrafter(TextDrafter):
    """A drafter of n-grams that were seen in the text or in a Jacobi window, which the target reads with the draft.

    There is nothing to train and nothing to load but options, so one made for a vocabulary serves every target with
    it.

    Example:

    ```python
    >>> drafter = LookaheadDrafter(LookaheadConfig(window_size=5, ngram_len=3, num_guesses=5, vocab_size=100))
    >>> drafter.num_parameters(), drafter.feature_layers, drafter.num_nodes
    (0, (), 20)

    ```
    """

    config: LookaheadConfig
    config_class = LookaheadConfig
    generator_class = LookaheadCandidateGenerator
    base_model_prefix = "drafter"

    def __init__(self, config: LookaheadConfig) -> None:
        super().__init__(config)
        marker = torch.empty(0)  # knows device and type, as weights would
        self.register_buffer("device_marker", marker, persistent=False)
        self.post_init()

    @property
    def device(self) -> torch.device:
        """Where drafts are made."""
        return self.get_buffer("device_marker").device

    @property
    def dtype(self) -> torch.dtype:
        """The type that was set; nothing is computed in it."""
        return self.get_buffer("device_marker").dtype

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft, root and lookahead nodes included."""
        return self.config.num_nodes

    @property
    def draft_settings(self) -> dict[str, int]:
        """Settings that decide its drafts."""
        return {name: getattr(self.config, name) for name in SMALLEST}

    def check_target(self, model: PreTrainedModel) -> None:
        """Refuse a target with another vocabulary; the shape of its layers does not matter.

        Raises:
            [`DrafterMismatchError`]: the vocabulary of `model` is not the one that the drafter was made for.
            [`OptionError`]: the options name a static tree, or ask for one that grows from probabilities.
        """
        self._check_tree(model)
        if self.generation_config.draft_tree is not None:
            raise OptionError(
                "A Lookahead drafter makes its trees from n-grams, but `draft_tree` names a static one. Set "
                "`drafter.generation_config.draft_tree = None`."
            )
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        if self.config.vocab_size != vocab_size:
            raise DrafterMismatchError(
                f"This drafter expects a vocabulary of size {self.config.vocab_size}, but the target "
                f"{named(model)} gives {vocab_size}. Make one for it: `LookaheadDrafter.from_target(target)`."
            )

    @classmethod
    def _load_model(cls, name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load options alone, by stock loading with an empty set of weights."""
        config, dtype = kwargs.pop("config", None), kwargs.pop("dtype", None)  # a config would keep "auto" as a type
        if config is None:
            config, kwargs = LookaheadConfig.from_pretrained(name_or_path, return_unused_kwargs=True, **kwargs)
        if config.model_type != LookaheadConfig.model_type:
            raise CheckpointError(
                f"`{name_or_path}` must hold the options of a Lookahead drafter, `model_type` "
                f"`{LookaheadConfig.model_type}`, but its `model_type` is `{config.model_type}`."
            )
        return super()._load_model(None, *args, config=config, state_dict={}, dtype=dtype or "auto", **kwargs)
