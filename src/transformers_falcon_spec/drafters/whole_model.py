"""The base of drafters that wrap a whole model of Transformers: its configuration, its tokens and how it is loaded.

Vocabularies of one family often differ in padding at their end alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import transformers
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from typing_extensions import Self

from ..core.options import option
from ..errors import CheckpointError, DrafterMismatchError, OptionError, quoted
from ..generation.model_parts import device_of, num_writable
from .base import DrafterModel
from .checkpoint import check_finite, hub_options, readable
from .config_fields import DrafterConfig, check_fields, own_fields, target_fields

READABLE_ATTENTION = ("sdpa", "eager")  # kinds that take any mask


@strict
class WholeModelConfig(DrafterConfig):
    """Base of the configurations of drafters that wrap a model.

    Args:
        draft_config (`PreTrainedConfig` or `dict`): Configuration of the model that drafts.
        vocab_size (`int`, *optional*, defaults to 32000): Size of the target's vocabulary.
        draft_vocab_size (`int`, *optional*): Ids, from 0 on, that mean the same to both models: only they are drafted.
            0 is the smaller vocabulary.
        target_name_or_path (`str`, *optional*): The target that it drafts for.
    """

    has_no_defaults_at_init: ClassVar[bool] = True
    sub_configs: ClassVar[dict[str, Any]] = {"draft_config": AutoConfig}

    draft_config: Any = None
    draft_vocab_size: int = option(0, least=0)

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other fields."""
        if isinstance(self.draft_config, dict):
            self.draft_config = self._known_config(**self.draft_config)

        if self.draft_config is None:
            raise OptionError(
                "`draft_config` must be the configuration of the model that drafts, but there is none. "
                "`from_pretrained(NAME, target=target)` of the drafter's class takes that of the model NAME."
            )

        if not self.draft_vocab_size:
            self.draft_vocab_size = min(self.vocab_size, self.draft_config.vocab_size)

        self.fill_in()
        super().__post_init__(**kwargs)

    def fill_in(self) -> None:
        """Set the fields of a subclass that follow from others, such as the wrapped model's configuration."""

    def check(self) -> None:
        """Refuse options out of range or at odds with one another: [`OptionError`]."""
        super().check()
        size = self.draft_config.vocab_size
        most = min(self.vocab_size, size)
        if not 1 <= self.draft_vocab_size <= most:
            raise OptionError(
                f"`draft_vocab_size` must lie in 1..{most}, for the target has {self.vocab_size} tokens and the draft "
                f"model {size}, but it is {self.draft_vocab_size}."
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
                f"The attention of a draft model must take masks, as {READABLE_ATTENTION} do, but it is "
                f'{attention!r}. Load it with `attn_implementation="sdpa"`.'
            )

        # with another `attn_implementation`, or without one, the model would lose its own
        common = {"draft_config": model.config, "dtype": model.dtype, "attn_implementation": attention}
        sizes = {**target_fields(target), "draft_vocab_size": min(num_shared, num_writable(target))}
        return cls(**{**common, **sizes, **options})

    @classmethod
    def _known_config(cls, model_type: str = "", **fields: Any) -> PreTrainedConfig:
        """The wrapped model's configuration, of a class that Transformers knows by its `model_type`."""
        try:
            return AutoConfig.for_model(model_type, **fields)
        except ValueError as error:
            raise OptionError(
                f"The draft model must be of a kind that Transformers knows, but its `model_type` is {model_type!r}. "
                "Register its classes, or wrap the model again: `from_pretrained(NAME, target=target, "
                "trust_remote_code=True)` of the drafter's class."
            ) from error


class WholeModelDrafter(DrafterModel, ABC):
    """Base of the drafters that wrap a model of Transformers, which their configuration holds as `draft_config`."""

    # options of `wrap`, besides fields of the configuration
    wrapping_options: ClassVar[tuple[str, ...]] = ("tokenizer", "target_tokenizer")

    def __init__(self, config: Any, model: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.model: Any = _auto_class(vars(config)).from_config(config.draft_config) if model is None else model
        config.draft_config = self.model.config  # one of them, which says how the model attends

    @classmethod
    @abstractmethod
    def wrap(cls, model: PreTrainedModel, target: PreTrainedModel, **options: Any) -> Self:
        """A drafter for `target` that drafts with `model`, which becomes a part of the drafter."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a drafter, or with `target=...` wrap the model of that name for it, in its type and on its device.

        A model to be wrapped takes the options of `wrap`, too. Tokenizers that are not given are loaded with the
        weights of both models, if there are any. Code that comes with a model runs with `trust_remote_code=True`
        alone. All other arguments are those of `PreTrainedModel.from_pretrained`.

        Raises:
            [`CheckpointError`]: no drafter where `target` is left out; files that cannot be read; weights that are
                missing, left over, of another shape or not finite.
            [`OptionError`]: options of `wrap` that do not fit, or for what is a drafter already.
            [`DrafterMismatchError`]: the model has other tokens than the target.
        """
        name = pretrained_model_name_or_path
        target = kwargs.pop("target", None)
        if target is not None:
            with readable(name):
                config = AutoConfig.from_pretrained(name, **_remote_options(kwargs))

            if config.model_type != cls.config_class.model_type:
                return cls._wrapped(name, target, args, kwargs)

        given = sorted(kwargs.keys() & set(cls.wrapping_options))
        if given:
            raise OptionError(
                f"{quoted(given)} must be left out unless a model is wrapped, with `target=...`, but `{name}` is to "
                "be loaded as a drafter."
            )

        drafter = super().from_pretrained(name, *args, **kwargs)
        drafter.load_extra_files(name, **hub_options(kwargs))
        if target is not None:
            drafter.to(device=device_of(target))  # type: ignore[call-arg]  # as below
            drafter.check_target(target)

        return drafter

    def load_extra_files(self, name_or_path: Any, **hub: Any) -> None:
        """Load further files of a saved drafter; a subclass that has some overrides this."""

    @classmethod
    def _wrapped(
        cls,
        name: Any,
        target: PreTrainedModel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Self:
        """The model of that name as a drafter."""
        names = (*own_fields(cls.config_class), *cls.wrapping_options)
        options = {field: kwargs.pop(field) for field in names if field in kwargs}
        model = cls._loaded(_auto_class(options), name, *args, **{"dtype": target.dtype, **kwargs})
        sources = {"tokenizer": (name, _remote_options(kwargs)), "target_tokenizer": (target.config._name_or_path, {})}

        for whose, (source, hub) in sources.items():
            if whose not in options:
                options[whose] = tokenizer_of(source, **hub)

        drafter = cls.wrap(model, target, **options)
        if "device_map" in kwargs:
            return drafter

        return drafter.to(device=device_of(target))  # type: ignore[call-arg]  # a decorator hides the signature

    @staticmethod
    def _loaded(auto_class: Any, name: Any, /, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """The model that drafts, which must have all its weights."""
        loaded: tuple[PreTrainedModel, dict[str, Any]]
        with readable(name):
            loaded = auto_class.from_pretrained(name, *args, **{**kwargs, "output_loading_info": True})

        model, info = loaded
        if info["missing_keys"]:
            raise CheckpointError(
                f"`{name}` must hold all weights of `{type(model).__name__}`, but it lacks "
                f"{sorted(info['missing_keys'])}. Take another checkpoint."
            )

        check_finite(model, name)
        return model


def _auto_class(options: Mapping[str, Any]) -> Any:
    """The class of Transformers that makes and loads the model."""
    return getattr(transformers, options.get("auto_class", "AutoModelForCausalLM"))


def _remote_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that say where to look, and whether code found there may run."""
    return {**hub_options(dict(kwargs)), "trust_remote_code": kwargs.get("trust_remote_code", False)}


def tokenizer_of(name_or_path: Any, **hub: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model; None where it has none, for Transformers would make up an empty one."""
    if not str(name_or_path) or not get_tokenizer_config(name_or_path, **hub):
        return None

    return AutoTokenizer.from_pretrained(name_or_path, **hub)


def shared_vocabulary(
    sizes: tuple[int, int], tokenizers: tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]
) -> int:
    """How many ids, from 0 on, mean the same to a draft model and its target.

    `sizes` are those of the two vocabularies, which must be equal where one of the `tokenizers` is missing.

    Raises:
        [`DrafterMismatchError`]: an id is another token to the target, or nobody can say.
    """
    draft, target = tokenizers
    if draft is None or target is None:
        if sizes[0] != sizes[1]:
            whose = "draft model" if draft is None else "target"
            raise DrafterMismatchError(
                f"The draft model has {sizes[0]} tokens and the target {sizes[1]}, so the tokens must be compared, "
                f"but the {whose} brings no tokenizer. Pass both: `tokenizer=..., target_tokenizer=...`."
            )

        return sizes[0]

    theirs = {number: token for token, number in target.get_vocab().items()}
    ours = {number: token for token, number in draft.get_vocab().items()}
    what = "no id is a token of both"
    num_shared = 0
    for number in sorted(ours.keys() & theirs.keys()):
        if number >= min(sizes):
            break

        if ours[number] != theirs[number]:
            what = f"id {number} is {ours[number]!r} in the draft model and {theirs[number]!r} in the target"
            num_shared = 0
            break

        num_shared = number + 1

    if num_shared:
        return num_shared

    raise DrafterMismatchError(
        f"Draft model and target must have the same tokens, but {what}. Take a draft model of the target's family."
    )
