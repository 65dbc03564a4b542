"""The base of configurations of drafters that wrap a whole model: its configuration and the shared tokens."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from typing_extensions import Self

from ..errors import OptionError
from .config_fields import check_fields, target_fields

READABLE_ATTENTION = ("sdpa", "eager")  # kinds that take any mask


@strict
class WholeModelConfig(PreTrainedConfig):
    """Base of the configurations of drafters that wrap a model.

    Args:
        draft_config (`PreTrainedConfig` or `dict`): Configuration of the model that drafts.
        vocab_size (`int`, *optional*, defaults to 32000): Size of the target's vocabulary.
        draft_vocab_size (`int`, *optional*): Ids, from 0 on, that mean the same to both models: only they are drafted.
            None is the smaller vocabulary.
        target_name_or_path (`str`, *optional*): The target that it drafts for.
    """

    has_no_defaults_at_init: ClassVar[bool] = True
    sub_configs: ClassVar[dict[str, Any]] = {"draft_config": AutoConfig}
    wrapped_kind: ClassVar[str] = "language model"  # as messages call the model
    short_kind: ClassVar[str] = "draft model"
    mask_kind: ClassVar[str] = "masks"
    drafter_name: ClassVar[str] = ""  # of the class that wraps it

    draft_config: dict[str, Any] | PreTrainedConfig | None = None
    vocab_size: int = 32000
    draft_vocab_size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    target_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        if isinstance(self.draft_config, dict):
            self.draft_config = self._known_config(**self.draft_config)
        if self.draft_config is None:
            raise OptionError(
                f"`draft_config` must be the configuration of a {self.wrapped_kind}, but there is none. "
                f"`{self.drafter_name}.from_pretrained(NAME, target=target)` takes that of the model NAME."
            )
        if self.draft_vocab_size is None:
            self.draft_vocab_size = min(self.vocab_size, self.draft_config.vocab_size)
        self.fill_in(self.draft_config)
        super().__post_init__(**kwargs)
        self.check()

    def fill_in(self, draft_config: PreTrainedConfig) -> None:
        """Set the fields of a subclass that follow from others and from the wrapped model's configuration."""

    def check(self) -> None:
        """Refuse options out of range or at odds with one another: [`OptionError`]."""
        assert isinstance(self.draft_config, PreTrainedConfig)  # filled in, as the next one is
        assert self.draft_vocab_size is not None
        size = self.draft_config.vocab_size
        most = min(self.vocab_size, size)
        if not 1 <= self.draft_vocab_size <= most:
            raise OptionError(
                f"`draft_vocab_size` must lie in 1..{most}, for the target has {self.vocab_size} tokens and the "
                f"{self.short_kind} {size}, but it is {self.draft_vocab_size}."
            )

    @classmethod
    def for_models(
        cls, model: PreTrainedModel, target: PreTrainedModel, num_shared: int, options: dict[str, Any]
    ) -> Self:
        """A configuration with which `model` drafts for `target`; `options` are fields."""
        check_fields(cls, options)
        attention = model.config._attn_implementation
        if attention not in READABLE_ATTENTION:
            raise OptionError(
                f"The attention of a {cls.short_kind} must take {cls.mask_kind}, as {READABLE_ATTENTION} do, but it "
                f'is {attention!r}. Load it with `attn_implementation="sdpa"`.'
            )
        # with another `attn_implementation`, or without one, the model would lose its own
        common = {"draft_config": model.config, "dtype": model.dtype, "attn_implementation": attention}
        return cls(**{**common, **target_fields(target), "draft_vocab_size": num_shared, **options})

    @classmethod
    def _known_config(cls, model_type: str = "", **fields: Any) -> PreTrainedConfig:
        """The wrapped model's configuration, of a class that Transformers knows by its `model_type`."""
        try:
            return AutoConfig.for_model(model_type, **fields)
        except ValueError as error:
            raise OptionError(
                f"The {cls.short_kind} must be of a kind that Transformers knows, but its `model_type` is "
                f"{model_type!r}. Register its classes, or wrap the model again: "
                f"`{cls.drafter_name}.from_pretrained(NAME, target=target, trust_remote_code=True)`."
            ) from error
