"""The configuration of a DFlash drafter: that of Transformers' own, and what this package's loop needs besides."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import MuseGlimmerAssistantConfig, PreTrainedModel

from ...core.tree import DraftTree
from ...errors import OptionError
from ..config_fields import own_fields, target_fields, trained_target_fields
from ..fingerprint import OLD_NAMES
from ..tree_drafting.temperatures import check_temperatures
from .stock import LEAST_BLOCK, config_for

LAYER_TYPES = ("full_attention", "sliding_attention")
SECOND_VERSION = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@strict
class DFlashConfig(MuseGlimmerAssistantConfig):
    """Configuration of [`DFlashDrafter`]; all fields of `MuseGlimmerAssistantConfig` are fields of it, too.

    Args:
        vocab_size (`int`, *optional*, defaults to 32000):
            Size of the target's vocabulary; embeddings and head are the target's.
        causal_layer_types (`list[str]`, *optional*):
            The types of layers in which a token of a block sees no later one of it; None is none of them.
        input_embedding_scale (`float`, *optional*, defaults to 1.0): A factor of the embeddings of a block.
        output_multiplier (`float`, *optional*, defaults to 1.0): A factor of the head's logits.
        final_logit_softcapping (`float`, *optional*): What those then stay below, by a tanh; None is no bound.
        conv_kernel_size (`int`, *optional*): DFlash2: tokens of a block that its convolutions read; None is DFlash.
        conv_group_size (`int`, *optional*): DFlash2: channels whose kernels change together with the input.
        selector_rank (`int`, *optional*): DFlash2: rank of the scores between a token and the one before it.
        selector_top_k (`int`, *optional*): DFlash2: the best tokens of a mask, which alone can be drafted.
        draft_tree (`dict`, *optional*):
            `{"parents": [...], "ranks": [...]}`, the static tree; None is a chain of a whole block.
        confidence_temperatures (`dict`, *optional*):
            How far trees that grow trust the drafter's probabilities, see [`PairConfig`].
        target_name_or_path (`str`, *optional*): The target the drafter was trained for.
        target_fingerprint (`dict`, *optional*): What that target was, so that others are noticed; None checks sizes.

    Raises:
        [`OptionError`]: a block without masks, a mask outside the vocabulary, no layer to read, layers of a type that
            is not known, or a part of DFlash2 alone.

    Example:

    ```python
    >>> DFlashConfig(vocab_size=100, hidden_size=64, mask_token_id=3, block_size=4).block_size
    4

    ```
    """

    model_type = "dflash_spec"
    attribute_map = OLD_NAMES

    vocab_size: int = 32000
    mask_token_id: int = 0
    eos_token_id: int | list[int] | None = 200001  # type: ignore[assignment]  # of some targets there are several
    causal_layer_types: list[str] | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    draft_tree: dict[str, Any] | None = None
    confidence_temperatures: dict[str, Any] | None = None
    target_name_or_path: str | None = None
    target_fingerprint: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse options out of range."""
        super().__post_init__(**kwargs)
        if self.block_size < LEAST_BLOCK:
            raise OptionError(
                f"`block_size` must be at least {LEAST_BLOCK}, the root included, but it is {self.block_size}."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise OptionError(
                f"`mask_token_id` must lie in 0..{self.vocab_size - 1}, the target's vocabulary, but it is "
                f"{self.mask_token_id}. Take the target that the drafter was trained for."
            )
        if not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise OptionError(
                "`target_layer_ids` must name layers of the target, counted from 0, but they are "
                f"{self.target_layer_ids}."
            )
        for name in ("layer_types", "causal_layer_types"):
            if not set(getattr(self, name) or ()) <= set(LAYER_TYPES):
                raise OptionError(f"`{name}` must be of {LAYER_TYPES}, but they are {getattr(self, name)}.")
        self._check_second_version()
        if self.draft_tree is not None:
            DraftTree.from_json(self.draft_tree)
        check_temperatures(self.confidence_temperatures, self.block_size - 1)

    def _check_second_version(self) -> None:
        sizes = {name: getattr(self, name) for name in SECOND_VERSION}
        if any(size is not None for size in sizes.values()) and min(size or 0 for size in sizes.values()) < 1:
            raise OptionError(f"DFlash2 needs all of {SECOND_VERSION}, each at least 1, but they are {sizes}.")
        if self.conv_group_size and self.hidden_size % self.conv_group_size:
            raise OptionError(
                f"`conv_group_size` must divide `hidden_size`, but they are {self.conv_group_size} and "
                f"{self.hidden_size}."
            )
        if self.selector_top_k and self.selector_top_k > self.vocab_size:
            raise OptionError(
                f"`selector_top_k` must be at most {self.vocab_size}, the vocabulary, but it is {self.selector_top_k}."
            )

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> "DFlashConfig":
        """A configuration whose sizes fit `target`; `options` are fields, others an [`OptionError`]."""
        config: DFlashConfig = config_for(cls, target, {**trained_target_fields(target), **options})
        return config

    @classmethod
    def of_stock(cls, fields: dict[str, Any], target: PreTrainedModel) -> "DFlashConfig":
        """The configuration with which Transformers' own drafter of these fields drafts for `target`.

        A tree and temperatures that commands have saved there are kept.
        """
        kept = {name: fields[name] for name in own_fields(cls) if name in fields}
        return cls(**{**kept, **target_fields(target)})
