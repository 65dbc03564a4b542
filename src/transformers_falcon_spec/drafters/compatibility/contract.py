"""The contract between a drafter and its target: what the drafter's config remembers of it."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import CheckpointError
from .fingerprint import PACKED, Fingerprint, Print

FIELD = "target_contract"  # of a drafter's config
SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
KEY_IDS = ("bos_token_id", "eos_token_id")  # padding is the caller's business: nobody drafts it


@dataclass(frozen=True)
class TargetContract:
    """What a drafter's config says of its target beside name and vocabulary, which are fields of their own.

    Args:
        shape (`dict`): Kind, depth and widths.
        dtype (`str`): Its type when the drafter was made or trained, such as `"bfloat16"`.
        quantization (`str`, *optional*): How its weights were quantised; None for plain ones.
        revision (`str`, *optional*): The commit on the Hub; None for a folder.
        template (`str`, *optional*): Digest of its chat template; None where no tokenizer was at hand.
        ids (`dict[str, list[int]]`): Special ids by name. Those in a drafter's config will not do: the Trainer sets them to the tokenizer's.
        weights (`dict[str, Print]`): Prints of its parts; those that could not be read are missing.
        skipped (`dict[str, str]`): Why; not stored.
    """

    shape: dict[str, Any]
    dtype: str
    quantization: str | None = None
    revision: str | None = None
    template: str | None = None
    ids: dict[str, list[int]] = field(default_factory=dict)
    weights: dict[str, Print] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, target: PreTrainedModel, tokenizer: Any = None) -> "TargetContract":
        """That of a target as it is; cheap for any size.

        Example:

        ```python
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> contract = TargetContract.of(LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)))
        >>> contract.dtype, sorted(contract.weights)
        ('float32', ['embeddings', 'head', 'layers'])
        >>> TargetContract.from_json(contract.to_json()) == contract
        True

        ```
        """
        text, found = target.config.get_text_config(decoder=True), Fingerprint.of(target)
        return cls(
            shape={name: getattr(text, name, None) for name in SHAPE},
            dtype=str(target.dtype).removeprefix("torch."),
            quantization=_quantization(target, found),
            revision=getattr(target.config, "_commit_hash", None),
            template=template_digest(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerBase) else None,
            ids={name: sorted(_ids(getattr(text, name, None))) for name in KEY_IDS},
            weights=found.prints,
            skipped=found.skipped,
        )

    def to_json(self) -> dict[str, Any]:
        """As a config stores it."""
        return {name: value for name, value in asdict(self).items() if name != "skipped"}

    @classmethod
    def from_json(cls, stored: Any) -> "TargetContract":
        """Read from a config.

        Raises:
            [`CheckpointError`]: it is none.
        """
        try:
            weights = {str(part): Print(**entry) for part, entry in stored["weights"].items()}
            return cls(**{**stored, "weights": weights})
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"`{FIELD}` of a drafter's config must be as `falcon-spec contract` writes it, but reading it fails: "
                f"{type(error).__name__}: {error}. Write it anew, or set it to null."
            ) from error


def record_target(config: Any, target: PreTrainedModel, tokenizer: Any = None) -> None:
    """Write into a drafter's config which target it is for; configs of stock models, which have no such field, stay as they are."""
    if hasattr(config, FIELD):
        setattr(config, FIELD, TargetContract.of(target, tokenizer).to_json())
        config.target_name_or_path = target.config._name_or_path or config.target_name_or_path


def made_for(config: Any) -> str:
    """How messages call the target that a drafter's config is for."""
    return f"`{config.target_name_or_path}`" if config.target_name_or_path else "a target without a name"


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Tells chat templates apart; no template counts as one."""
    template: Any = tokenizer.chat_template
    text = template.strip() if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _quantization(target: PreTrainedModel, found: Fingerprint) -> str | None:
    """How a target is quantised: as its config says, else as its weights look."""
    config: Any = getattr(target.config, "quantization_config", None)
    if config is not None:
        stored = config if isinstance(config, dict) else vars(config)
        method = stored.get("quant_method") or type(config).__name__
        return str(getattr(method, "value", method))
    return "in place" if PACKED in found.skipped.values() else None
