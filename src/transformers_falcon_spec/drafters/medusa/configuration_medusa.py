"""The configuration of a Medusa drafter: number and size of its heads, and the draft tree."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig, PreTrainedModel

from ...core.tree import DraftTree
from ...errors import OptionError
from ...generation.head import head_width
from ..config_fields import check_fields, trained_target_fields
from ..fingerprint import OLD_NAMES


@strict
class MedusaConfig(PreTrainedConfig):
    """Configuration of [`MedusaDrafter`].

    Args:
        hidden_size (`int`, *optional*, defaults to 4096): Width of what the target's head reads.
        num_heads (`int`, *optional*, defaults to 5): Heads, and with them the deepest draft; the paper finds 5 enough.
        num_layers (`int`, *optional*, defaults to 1): Residual blocks of each head.
        has_lm_heads (`bool`, *optional*, defaults to `True`): Whether each head ends in an LM head of its own, as
            Medusa-1 does, or in the target's, as v2 heads do.
        vocab_size (`int`, *optional*, defaults to 32000): Size of the target's vocabulary.
        draft_tree (`dict`, *optional*): `{"parents": [...], "ranks": [...]}`; None drafts the best 16 nodes for heads
            whose every rank is right half as often as the one before.
        target_name_or_path (`str`, *optional*): The target the drafter was trained for.
        target_fingerprint (`dict`, *optional*): What that target was; see
            [`~drafters.fingerprint.TargetFingerprint`]. None checks sizes alone.

    Example:

    ```python
    >>> MedusaConfig(hidden_size=64, vocab_size=100, num_heads=3).num_layers
    1

    ```
    """

    model_type = "medusa_spec"
    attribute_map = OLD_NAMES

    hidden_size: int = 4096
    num_heads: int = 5
    num_layers: int = 1
    has_lm_heads: bool = True
    vocab_size: int = 32000
    draft_tree: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    target_name_or_path: str | None = None
    target_fingerprint: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse options out of range."""
        super().__post_init__(**kwargs)
        for name in ("hidden_size", "num_heads", "num_layers", "vocab_size"):
            if getattr(self, name) < 1:
                raise OptionError(f"`{name}` must be at least 1, but it is {getattr(self, name)}.")
        if self.draft_tree is not None:
            DraftTree.from_json(self.draft_tree)

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> "MedusaConfig":
        """A configuration whose sizes fit `target`; `options` are fields, others an [`OptionError`]."""
        check_fields(cls, options)
        return cls(**{"hidden_size": head_width(target), **trained_target_fields(target), **options})
