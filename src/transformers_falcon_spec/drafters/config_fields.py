"""The bases of drafters' configurations: what follows from the target, and checks of names and values.

Trees that grow trust a drafter's probabilities at temperatures by position; `falcon-spec calibrate` fits them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME
from typing_extensions import Self

from ..core.options import check_known, check_options, option
from ..core.tree import DraftTree
from ..errors import OptionError
from ..generation.head import feature_width, head_width, inner_width
from ..generation.model_parts import check_takes_back, embedding_width, in_layers, num_writable
from ..generation.text_limits import scaled_context
from ..provenance import portable
from .checkpoint import write_whole
from .fingerprint import FIELD, TargetFingerprint

DEFAULT_CONTEXT = 2048  # positions, for targets whose configuration names no limit
_NAMES = ("target_name_or_path", "_name_or_path")  # of models, whose folders other machines do not have
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@strict
class DrafterConfig(PreTrainedConfig):
    """Base of the configurations of drafters.

    A subclass has a `model_type` and fields of its own, each with a default; [`~core.options.option`] gives a field
    bounds.

    Args:
        vocab_size (`int`, *optional*, defaults to 32000): Size of the target's vocabulary.
        target_name_or_path (`str`, *optional*): The target that the drafter was made for.
    """

    vocab_size: int = option(32000, least=1)
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    target_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse options out of range: [`OptionError`]."""
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Refuse options out of range; subclasses add what options must be to one another."""
        check_options(self)

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """A configuration whose sizes fit `target`; `options` are fields, others an [`OptionError`]."""
        check_fields(cls, options)
        fitting = {**target_fields(target), **cls.sizes_for(target, options)}
        if hasattr(cls, FIELD):
            fitting[FIELD] = TargetFingerprint.of_target(target).to_json()

        return cls(**{**fitting, **options})

    @classmethod
    def sizes_for(cls, target: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        """Fields of a subclass that follow from a target; `options` are those that were given."""
        return {}


def target_fields(target: PreTrainedModel) -> dict[str, Any]:
    """Fields that a drafter's config copies from its target: vocabulary, special ids and name."""
    check_takes_back(target)
    config = target.config.get_text_config(decoder=True)
    special = {name: getattr(config, name, None) for name in _SPECIAL_IDS}
    return {**special, "vocab_size": config.vocab_size, "target_name_or_path": target.config._name_or_path}


def own_fields(config_class: Any) -> set[str]:
    """Names of the fields that a drafter's configuration has besides those of every configuration."""
    return _names(config_class) - _names(PreTrainedConfig)


def check_fields(config_class: type, options: dict[str, Any]) -> None:
    """Refuse options that are no fields of a configuration: [`OptionError`]."""
    check_known(config_class.__name__, options, _names(config_class))


def _names(config_class: Any) -> set[str]:
    return {field.name for field in fields(config_class)}


def update_config(folder: Path, file: str = CONFIG_NAME, **fields: Any) -> None:
    """Write fields into a config of a drafter's folder, and names of models without this machine's paths."""
    path = folder / file
    config = json.loads(path.read_text(encoding="utf-8")) | fields
    write_whole(path, json.dumps(_named(config), indent=2, sort_keys=True) + "\n")


def _named(config: dict[str, Any]) -> dict[str, Any]:
    named = dict(config)
    for name, value in config.items():
        if isinstance(value, dict):
            named[name] = _named(value)
        elif name in _NAMES:
            named[name] = portable(value)

    return named


def context_of(config: Any) -> int | None:
    """The longest text that a model is made for, as its positions are scaled; None where nothing limits it."""
    return scaled_context(config.get_text_config(decoder=True))


@strict
class DraftVocabularyConfig(DrafterConfig):
    """Base of the configurations of drafters that may draft a part of the target's tokens alone.

    Args:
        draft_vocab_size (`int`, *optional*): Tokens that can be drafted; None is all of them. See
            [`~drafters.draft_vocabulary.DraftVocabulary`].
        draft_tree (`dict`, *optional*): `{"parents": [...], "ranks": [...]}`; the static tree.
        target_fingerprint (`dict`, *optional*): What the target was; None checks sizes alone.
    """

    draft_vocab_size: int | None = None
    draft_tree: dict[str, Any] | None = option(None, check=DraftTree.from_json)
    target_fingerprint: dict[str, Any] | None = None

    @classmethod
    def from_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """A configuration whose sizes fit `target`, with a list of tokens where its head knows some alone."""
        if num_writable(target) < target.config.get_text_config(decoder=True).vocab_size:
            options.setdefault("draft_vocab_size", num_writable(target))
        return super().from_target(target, **options)

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        if not 1 <= self.num_draftable_tokens <= self.vocab_size:
            raise OptionError(
                f"`draft_vocab_size` must lie in 1..{self.vocab_size}, the target's vocabulary, but it is "
                f"{self.num_draftable_tokens}."
            )

    @property
    def num_draftable_tokens(self) -> int:
        """Tokens that can be drafted."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether only some of the target's tokens can be drafted."""
        return self.num_draftable_tokens != self.vocab_size


# Drafters that read pairs


@strict
class PairConfig(DraftVocabularyConfig, LlamaConfig):
    """Base of the configurations of drafters that read pairs; fields of their layers are those of `LlamaConfig`.

    It has the field of [`DraftVocabularyConfig`], too: `draft_vocab_size`.

    Args:
        feature_layers (`list[int]`, *optional*, defaults to `[-1]`):
            Which hidden states of the target are read, as Transformers counts them; -1 is the input of the head.
        feature_size (`int`, *optional*): Width of those together; 0 is `hidden_size` for each.
        embedding_size (`int`, *optional*): Width of the target's token embeddings; 0 is `hidden_size`.
        own_embeddings (`bool`, *optional*, defaults to `False`):
            Whether tokens are read as embeddings of the drafter's own instead of the target's; training leaves them as
            they are.
        draft_tree (`dict`, *optional*): `{"parents": [...], "ranks": [...]}`; the static tree; None is a chain.
        sliding_window (`int`, *optional*):
            Newest tokens of the text that the drafter attends to and keeps; None is all of them. Training records the
            length that nearly all its examples keep to, since drafts get worse over distances that were not trained.
        confidence_temperatures (`dict`, *optional*):
            How far trees that grow trust the drafter's probabilities: `{"greedy": [...], "sampled": [...]}`, for each
            position of a block what [`confidence_temperature`] takes. None trusts the drafter as it is.
        target_name_or_path (`str`, *optional*): The target the drafter was trained for.
        target_fingerprint (`dict`, *optional*): What that target was, so that others are noticed; None checks sizes.
    """

    num_hidden_layers: int = option(1, least=1)
    feature_layers: list[int] | tuple[int, ...] = (-1,)
    feature_size: int = option(0, least=0)
    embedding_size: int = option(0, least=0)
    own_embeddings: bool = False
    sliding_window: int | None = option(None, least=1)
    confidence_temperatures: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the widths that follow from other fields, and refuse options out of range: [`OptionError`]."""
        self.feature_size = self.feature_size or self.hidden_size * len(self.feature_layers)
        self.embedding_size = self.embedding_size or self.hidden_size
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Refuse options out of range or at odds with one another."""
        super().check()
        if not self.feature_layers:
            raise OptionError(
                "`feature_layers` must name at least one hidden state, but it is empty. -1 is the last one."
            )

        check_temperatures(self.confidence_temperatures, getattr(self, "block_size", 1))

    @classmethod
    def default_feature_layers(cls, num_layers: int, options: dict[str, Any]) -> tuple[int, ...]:  # noqa: ARG003
        """Hidden states that are read of a target with so many layers, unless `options` name others."""
        return (-1,)

    @classmethod
    def sizes_for(cls, target: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
        """Widths, heads and positions of a drafter for `target`, and what it reads."""
        text = target.config.get_text_config(decoder=True)
        hidden = head_width(target)  # what it drafts is read by the target's head
        heads = num_heads(text, hidden)
        layers = tuple(options.get("feature_layers", cls.default_feature_layers(text.num_hidden_layers, options)))
        return {
            "hidden_size": hidden,
            "intermediate_size": inner_width(target),
            "num_attention_heads": heads,
            "num_key_value_heads": num_key_heads(text, heads),
            "initializer_range": hidden**-0.5,
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT,
            "embedding_size": embedding_width(target),
            "feature_layers": layers,
            "feature_size": feature_width(target, layers),
        }


HEAD_SIZE = 64  # where the target has no heads that fit


def num_heads(text_config: PreTrainedConfig, width: int) -> int:
    """The heads of a layer of this width: as many as in the target, if it has some and they share the width."""
    heads: int = in_layers(text_config, "num_attention_heads")[0] or 0
    return heads if heads and width % heads == 0 else max(width // HEAD_SIZE, 1)


def num_key_heads(text_config: PreTrainedConfig, heads: int) -> int:
    """The heads of a layer's keys: as many as in the target, if the `heads` of its queries share them."""
    key_heads: int = in_layers(text_config, "num_key_value_heads")[0] or heads
    return key_heads if heads % key_heads == 0 else heads


def check_temperatures(values: dict[str, Any] | None, block_size: int) -> None:
    """Refuse stored `confidence_temperatures` that are none, or not those of one block: [`OptionError`]."""
    if values is None:
        return

    try:
        greedy = list(map(float, values["greedy"]))
        sampled = list(map(float, values["sampled"]))
        is_finite = math.isfinite(sum(greedy) + sum(sampled))
        is_whole = len(greedy) == len(sampled) == block_size
        is_right = is_finite and is_whole and min(greedy) > 0 <= min(sampled)
    except (TypeError, ValueError, KeyError):
        is_right = False

    if not is_right:
        raise OptionError(
            'A stored `confidence_temperatures` must be `{"greedy": [...], "sampled": [...]}`, lists of finite '
            "numbers, those of greedy above 0 and the others at least 0, one for each position of a block of "
            f"{block_size}, but it is {values!r:.120}. Fit them: `falcon-spec calibrate`."
        )


def confidence_temperature(greedy: float, sampled: float, temperature: float | None) -> float:
    """At which temperature the softmax of a drafter's scores tells how likely the target takes a token.

    Scores are logits, less the temperature of the draws times the log of their noise. The target's scores spread about
    them: by `greedy` when it takes the best, and the more the hotter it draws, for hotter text is harder to foresee.
    The two add up as independent errors do.
    """
    return greedy if temperature is None else math.hypot(greedy, temperature * sampled)


def block_temperatures(
    stored: Mapping[str, Sequence[float]] | None, block_size: int, temperature: float | None
) -> list[float]:
    """The temperatures of the positions of a block, for draws at `temperature`."""
    if stored is None:
        return [1.0 if temperature is None else temperature] * block_size

    pairs = zip(stored["greedy"], stored["sampled"], strict=True)
    return [confidence_temperature(greedy, sampled, temperature) for greedy, sampled in pairs]
