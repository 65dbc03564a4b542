"""The fingerprint of a target: what a drafter's config keeps of it, so that another target is recognised later.

Of the weights it holds a few slices of embeddings, head and layers: a digest of the values, whatever their type, and a
small sample, which tells rounding to another type from other weights.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import CheckpointError
from ...generation.model_parts import decoder_of

FIELD = "target_fingerprint"  # of a drafter's config
OLD_NAMES = {"target_contract": FIELD}  # for `attribute_map` of configs: files of older versions say so
SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
KEY_IDS = ("bos_token_id", "eos_token_id")  # padding is the caller's business: nobody drafts it
ADAPTERS = "adapters"
PACKED = "it is quantised"
Likeness = Literal["same", "rounded", "different"]

NUM_WEIGHTS = 16  # matrices of the layers, from the first to the last
NUM_VALUES = 256  # first values of a row
NUM_SAMPLED = 16  # values of a part that are kept
TABLE_ROWS = (0.13, 0.38, 0.63, 0.88)  # rows of embeddings and head that are read, as fractions of the table
LAYER_ROWS = (0.3, 0.7)
UNRELATED = 0.5  # of the larger norm: samples that lie farther apart are not of one model, trained on or not
ROUNDING = 2**-7  # two roundings to bfloat16 differ by no more, relative ...
ROUNDING_NEAR_ZERO = 2**-24  # ... or as much as float16 leaves of small values


@dataclass(frozen=True)
class WeightFingerprint:
    """A digest and a sample of the weights of one part of a target, both hexadecimal."""

    digest: str  # of the values as float32
    sample: str  # some of them in bfloat16

    @classmethod
    def of_values(cls, values: Tensor) -> "WeightFingerprint":
        """The fingerprint of float32 values on the CPU."""
        indices = torch.linspace(0, len(values) - 1, NUM_SAMPLED, dtype=torch.float).long()
        return cls(_digest(_bytes(values)), _bytes(values[indices].bfloat16()).hex())

    def likeness(self, other: "WeightFingerprint") -> Likeness:
        """Whether the values are the same, differ as rounding to 16 bits makes them differ, or more."""
        if self.digest == other.digest:
            return "same"
        mine, theirs = self._values(), other._values()
        if mine.shape != theirs.shape:
            return "different"
        allowed = ROUNDING * torch.maximum(mine.abs(), theirs.abs()) + ROUNDING_NEAR_ZERO
        return "rounded" if bool(((mine - theirs).abs() <= allowed).all()) else "different"

    def is_related(self, other: "WeightFingerprint") -> bool:
        """Whether one may come from the other by training on."""
        mine, theirs = self._values(), other._values()
        if mine.shape != theirs.shape:
            return False
        return bool((mine - theirs).norm() <= UNRELATED * torch.maximum(mine.norm(), theirs.norm()))

    def _values(self) -> Tensor:
        try:
            return torch.frombuffer(bytearray.fromhex(self.sample), dtype=torch.bfloat16).float()
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"The sample of a target's weights in `{FIELD}` must be hexadecimal, but it is {self.sample!r:.60}. "
                "Write it anew: `falcon-spec fingerprint`."
            ) from error


@dataclass(frozen=True)
class TargetFingerprint:
    """The facts of a target that a drafter's config stores besides name and vocabulary."""

    shape: dict[str, Any]  # kind, depth and widths
    dtype: str  # when the drafter was made or trained, such as "bfloat16"
    quantization: str | None = None  # how weights were quantised; None for plain ones
    revision: str | None = None  # the commit on the Hub; None for a folder
    template: str | None = None  # digest of the chat template; None where no tokenizer was at hand
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # with which the chat template was used
    ids: dict[str, list[int]] = field(default_factory=dict)  # special ids; after training those of the tokenizer
    # By part: embeddings, head, layers, and adapters where PEFT put some into the layers.
    weights: dict[str, WeightFingerprint] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict, compare=False)  # why parts could not be read; not stored

    @classmethod
    def of_target(
        cls, target: PreTrainedModel, tokenizer: Any = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> "TargetFingerprint":
        """The fingerprint of a target as it is; cheap for any size, for a few thousand values are read."""
        text, (weights, skipped) = target.config.get_text_config(decoder=True), _read_weights(target)
        special = {name: getattr(text, name, None) for name in KEY_IDS}
        return cls(
            shape={name: getattr(text, name, None) for name in SHAPE},
            dtype=str(target.dtype).removeprefix("torch."),
            quantization=_quantization(target, is_packed=PACKED in skipped.values()),
            revision=getattr(target.config, "_commit_hash", None),
            template=template_digest(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerBase) else None,
            template_kwargs=dict(template_kwargs or {}),
            ids={name: [ids] if isinstance(ids, int) else sorted(set(ids or ())) for name, ids in special.items()},
            weights=weights,
            skipped=skipped,
        )

    def to_json(self) -> dict[str, Any]:
        """The fingerprint as a config stores it; earlier versions know no arguments for the chat template."""
        left_out = {"skipped"} if self.template_kwargs else {"skipped", "template_kwargs"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @classmethod
    def from_json(cls, stored: Any) -> "TargetFingerprint":
        """The fingerprint that a config stores; [`CheckpointError`] where that is none."""
        try:
            weights = {str(part): WeightFingerprint(**entry) for part, entry in stored["weights"].items()}
            return cls(**{**stored, "weights": weights})
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"`{FIELD}` of a drafter's config must be as `falcon-spec fingerprint` writes it, but reading it "
                f"fails: {type(error).__name__}: {error}. Write it anew, or set it to null."
            ) from error


def record_target(
    config: Any, target: PreTrainedModel, tokenizer: Any = None, template_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Write the target into a drafter's config; configs of stock models have no field for it and stay as they are."""
    if hasattr(config, FIELD):
        setattr(config, FIELD, TargetFingerprint.of_target(target, tokenizer, template_kwargs).to_json())
        config.target_name_or_path = target.config._name_or_path or config.target_name_or_path


def target_name(config: Any) -> str:
    """The name by which messages call the target that a drafter's config is for."""
    return f"`{config.target_name_or_path}`" if config.target_name_or_path else "a target without a name"


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest that tells chat templates apart; no template counts as one."""
    template: Any = tokenizer.chat_template
    return _digest((template.strip() if isinstance(template, str) else json.dumps(template, sort_keys=True)).encode())


def _quantization(target: PreTrainedModel, is_packed: bool) -> str | None:
    """How a target is quantised: as its config says, else as its weights look."""
    config: Any = getattr(target.config, "quantization_config", None)
    if config is None:
        return "in place" if is_packed else None
    stored = config if isinstance(config, dict) else vars(config)
    method = stored.get("quant_method") or type(config).__name__
    return str(getattr(method, "value", method))


@torch.no_grad()
def _read_weights(model: PreTrainedModel) -> tuple[dict[str, WeightFingerprint], dict[str, str]]:
    """Fingerprints of a target's parts, and why others have none: they are offloaded, sharded or quantised."""
    found: dict[str, WeightFingerprint] = {}
    skipped: dict[str, str] = {}
    tables = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    parts: dict[str, list[Any]] = {name: [getattr(table, "weight", None)] for name, table in tables.items()}
    parts["layers"], added = map(_spread, _layer_weights(model))
    adapted: Any = [layer for layer in model.modules() if hasattr(layer, "base_layer")]
    if any(layer.active_adapters and not layer.disable_adapters for layer in adapted):  # switched on
        parts[ADAPTERS] = added
    for name, weights in parts.items():
        reason = next(filter(None, map(_why_unreadable, weights)), None if weights else "there are none")
        if reason is None:
            rows = TABLE_ROWS if name in tables else LAYER_ROWS
            values = [_row(weight, fraction) for weight in weights for fraction in rows]
            found[name] = WeightFingerprint.of_values(torch.cat(values))
        else:
            skipped[name] = reason
    return found, skipped


def _layer_weights(model: PreTrainedModel) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of the decoder, in order, without embeddings: its own, and what adapters added."""
    named = dict(decoder_of(model).named_parameters())
    adapted = tuple(name.partition("base_layer.")[0] for name in named if "base_layer." in name)
    embeddings = getattr(model.get_input_embeddings(), "weight", None)
    matrices = {name: weight for name, weight in named.items() if weight.dim() > 1 and weight is not embeddings}
    added = [name for name in matrices if name.startswith(adapted) and "base_layer." not in name]
    return [matrices[name] for name in matrices if name not in added], [matrices[name] for name in added]


def _spread(weights: list[Tensor]) -> list[Tensor]:
    """Some of the weights, evenly spread from the first to the last."""
    num = min(len(weights), NUM_WEIGHTS)
    return [weights[index * (len(weights) - 1) // max(num - 1, 1)] for index in range(num)]


def _why_unreadable(weight: Any) -> str | None:
    """Why the values of a weight cannot be read without loading, gathering or unpacking it; None where they can."""
    if not isinstance(weight, Tensor):
        return PACKED if callable(weight) else "it keeps no weight of its own"  # a function unpacks it
    if weight.device.type == "meta":
        return "it is offloaded"
    if hasattr(weight, "device_mesh") or weight.numel() == 0:
        return "it is sharded over processes"
    is_packed = type(weight.data) is not Tensor or not weight.is_floating_point()
    return PACKED if is_packed else None


def _row(weight: Tensor, fraction: float) -> Tensor:
    """The first values of the row at a fraction of each leading axis."""
    while weight.dim() > 1:
        weight = weight[int(fraction * len(weight))]
    return weight[:NUM_VALUES].float().cpu()


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
