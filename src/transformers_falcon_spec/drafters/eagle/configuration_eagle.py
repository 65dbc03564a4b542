"""The configuration of an Eagle drafter: its version, its vocabulary and its norms."""

from typing import Any

from huggingface_hub.dataclasses import strict

from ...errors import OptionError
from ..tree_drafting.configuration import PairConfig

VERSIONS = (1, 3)
OF_VERSION_3 = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MIN_LAYERS_AS_PUBLISHED = 7  # with fewer, two of the published three layers are one


@strict
class EagleConfig(PairConfig):
    """Configuration of [`EagleDrafter`]; fields of its one decoder layer are those of `LlamaConfig`.

    It has the fields of [`~drafters.tree_drafting.configuration.PairConfig`], too: `feature_layers`, `feature_size`,
    `embedding_size`, `draft_tree`, `confidence_temperatures`, and the target that it was trained for.

    Args:
        version (`int`, *optional*, defaults to 1): 1 is Eagle-1 and Eagle-2, whose weights are alike; 3 is Eagle-3.
        qkv_bias (`bool`, *optional*, defaults to `False`): Biases on queries, keys and values, as for Qwen2.
        fc_bias (`bool`, *optional*): A bias on `fc`; None is True in version 1 and False in version 3.
        draft_vocab_size (`int`, *optional*): Version 3: tokens that can be drafted; None is the whole vocabulary.
        norm_before_residual (`bool`, *optional*, defaults to `False`): Version 3: the residual is the normed state,
            as in checkpoints of speculators.
        norm_before_fc (`bool`, *optional*, defaults to `False`): Version 3: one norm over all features before `fc`.
        fc_norm (`bool`, *optional*, defaults to `False`): Eagle-3.1: a norm for each layer's feature before `fc`.
        norm_output (`bool`, *optional*, defaults to `False`): Eagle-3.1: the state fed back is the normed one.

    Example:

    ```python
    >>> config = EagleConfig(version=3, hidden_size=64, num_attention_heads=4, feature_layers=[1, 2, 3])
    >>> config.feature_size, config.fc_bias
    (192, False)

    ```
    """

    model_type = "eagle_spec"

    version: int = 1
    qkv_bias: bool = False
    fc_bias: bool | None = None
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        if self.fc_bias is None:
            self.fc_bias = self.version == 1
        super().__post_init__(**kwargs)

    @property
    def num_draftable_tokens(self) -> int:
        """Tokens that can be drafted."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether only some of the target's tokens can be drafted."""
        return self.num_draftable_tokens != self.vocab_size

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        if self.version not in VERSIONS:
            raise OptionError(
                f"`version` must be one of {VERSIONS}, but it is {self.version}. Eagle-2 has the weights of version 1."
            )
        if self.num_hidden_layers != 1:
            raise OptionError(f"`num_hidden_layers` must be 1, but it is {self.num_hidden_layers}.")
        super().check()
        assert self.feature_size is not None  # filled in
        given = [name for name in OF_VERSION_3 if getattr(self, name)]
        if self.version == 1 and given:
            raise OptionError(f"{', '.join(f'`{name}`' for name in given)} must be left out unless `version` is 3.")
        if self.version == 1 and self.feature_size != self.hidden_size:
            raise OptionError(
                "Version 1 feeds itself what it predicts, so `feature_layers` must be [-1] and `feature_size` the "
                f"hidden size, {self.hidden_size}, but they are {list(self.feature_layers)} and {self.feature_size}. "
                "Version 3 reads others."
            )
        if self.fc_norm and self.feature_size % len(self.feature_layers):
            raise OptionError(
                f"`fc_norm` needs features of one width, but {len(self.feature_layers)} layers make "
                f"{self.feature_size} together."
            )
        if not 1 <= self.num_draftable_tokens <= self.vocab_size:
            raise OptionError(
                f"`draft_vocab_size` must lie in 1..{self.vocab_size}, the target's vocabulary, but it is "
                f"{self.num_draftable_tokens}."
            )

    @classmethod
    def default_feature_layers(cls, num_layers: int, options: dict[str, Any]) -> tuple[int, ...]:
        """Version 1 reads the input of the head, version 3 what [`eagle3_feature_layers`] names."""
        return eagle3_feature_layers(num_layers) if options.get("version") == VERSIONS[1] else (-1,)


def eagle3_feature_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states that Eagle-3 reads, early, middle and late; fewer of a target with fewer than four layers.

    Source: the code published with arXiv 2503.01840: 2, n // 2 and n - 3.
    """
    if num_layers >= MIN_LAYERS_AS_PUBLISHED:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1}))
