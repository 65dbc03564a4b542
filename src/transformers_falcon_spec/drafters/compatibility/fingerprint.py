"""What tells one target's weights from another's: a few slices of embeddings, head and layers, read where they can be read.

A digest of the values, whatever their type, tells equal from different. Where types differ, values are rounded, so a small
sample of them is kept as well: it tells rounding from other weights.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import CheckpointError
from ...generation.model_parts import decoder_of

ADAPTERS = "adapters"
PACKED = "it is quantised"
Likeness = Literal["same", "rounded", "different"]

NUM_WEIGHTS = 16  # of the layers, from the first to the last
NUM_VALUES = 256  # of a row, its first ones
NUM_SAMPLED = 16  # of all values of a part
TABLE_ROWS = (0.13, 0.38, 0.63, 0.88)  # where rows of embeddings and head stand, as shares of the table
LAYER_ROWS = (0.3, 0.7)
UNRELATED = 0.5  # of the larger norm: samples that lie farther apart are not of one model, trained on or not
ROUNDING = 2**-7  # two roundings to bfloat16 differ by no more, relative ...
ROUNDING_NEAR_ZERO = 2**-24  # ... or as much as float16 leaves of small values


@dataclass(frozen=True)
class Print:
    """What is kept of one part of a target.

    Args:
        digest (`str`): Of the values as float32, 16 hexadecimal digits.
        sample (`str`): Some of them in bfloat16, hexadecimal.
    """

    digest: str
    sample: str

    @classmethod
    def of(cls, values: Tensor) -> "Print":
        """Of float32 values on the CPU."""
        places = torch.linspace(0, len(values) - 1, NUM_SAMPLED, dtype=torch.float).long()
        return cls(hashlib.blake2b(_bytes(values), digest_size=8).hexdigest(), _bytes(values[places].bfloat16()).hex())

    def likeness(self, other: "Print") -> Likeness:
        """Whether the values are the same, differ as rounding to 16 bits makes them differ, or more."""
        if self.digest == other.digest:
            return "same"
        mine, theirs = self._values(), other._values()
        if mine.shape != theirs.shape:
            return "different"
        allowed = ROUNDING * torch.maximum(mine.abs(), theirs.abs()) + ROUNDING_NEAR_ZERO
        return "rounded" if bool(((mine - theirs).abs() <= allowed).all()) else "different"

    def is_related(self, other: "Print") -> bool:
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
                f"The sample of a target's weights in `target_contract` must be hexadecimal, but it is {self.sample!r:.60}. "
                "Write the contract anew: `falcon-spec contract`."
            ) from error


@dataclass(frozen=True)
class Fingerprint:
    """The prints of a target's parts, and why others have none.

    Args:
        prints (`dict[str, Print]`): By part: `embeddings`, `head`, `layers`, and `adapters` where PEFT put some into the layers.
        skipped (`dict[str, str]`): By part why it cannot be read.
    """

    prints: dict[str, Print] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel) -> "Fingerprint":
        """Of a target, a few thousand values of it; parts that are offloaded, sharded or quantised are left out."""
        found, (own, added) = cls(), _layer_weights(model)
        parts: list[tuple[str, list[Tensor | None], tuple[float, ...]]] = [
            ("embeddings", [_table(model.get_input_embeddings())], TABLE_ROWS),
            ("head", [_table(model.get_output_embeddings())], TABLE_ROWS),
            ("layers", _spread(own), LAYER_ROWS),
        ]
        if adapters_of(model):
            parts.append((ADAPTERS, _spread(added), LAYER_ROWS))
        for name, weights, rows in parts:
            reason = next(filter(None, map(_why_unreadable, weights)), None if weights else "there are none")
            if reason is None:
                values = torch.cat([_row(weight, place) for weight in weights if weight is not None for place in rows])
                found.prints[name] = Print.of(values)
            else:
                found.skipped[name] = reason
        return found


def adapters_of(model: PreTrainedModel) -> list[str]:
    """Names of the adapters that PEFT put into the layers of a target and that are switched on."""
    layers: Any = (part for part in model.modules() if hasattr(part, "base_layer"))
    names = {name for layer in layers if not layer.disable_adapters for name in layer.active_adapters}
    return sorted(names)


def _table(module: Any) -> Tensor | None:
    return getattr(module, "weight", None)


def _layer_weights(model: PreTrainedModel) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices of the decoder, in order, without embeddings: its own, and what adapters added."""
    named = dict(decoder_of(model).named_parameters())
    adapted = tuple(name.partition("base_layer.")[0] for name in named if "base_layer." in name)
    embeddings = _table(model.get_input_embeddings())
    own: list[Tensor] = []
    added: list[Tensor] = []
    for name, weight in named.items():
        if weight.dim() > 1 and weight is not embeddings:
            is_added = bool(adapted) and name.startswith(adapted) and "base_layer." not in name
            (added if is_added else own).append(weight)
    return own, added


def _spread(weights: list[Tensor]) -> list[Tensor | None]:
    """Some of them, evenly from the first to the last."""
    num = min(len(weights), NUM_WEIGHTS)
    return [weights[place * (len(weights) - 1) // max(num - 1, 1)] for place in range(num)]


def _why_unreadable(weight: Tensor | None) -> str | None:
    """Why the values of a weight cannot be looked at without loading, gathering or unpacking it; None where they can."""
    if weight is None:
        return "it keeps no weight of its own"
    reasons = {
        "it is offloaded": weight.device.type == "meta",
        "it is sharded over processes": hasattr(weight, "device_mesh") or weight.numel() == 0,
        PACKED: not weight.is_floating_point() or type(weight.data) is not Tensor,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _row(weight: Tensor, place: float) -> Tensor:
    """The first values of the row at a share of each leading axis."""
    while weight.dim() > 1:
        weight = weight[int(place * len(weight))]
    return weight[:NUM_VALUES].float().cpu()


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()
