"""The fingerprint of a target: what a drafter's config keeps of it, and how a target at hand differs from that.

Of the weights it holds a few slices of embeddings, head and layers: a digest of the values, whatever their type, and a
small sample, which tells rounding to another type from other weights. `FACTS` is the table of what is compared. A
target whose ids are other tokens is refused. Other differences are logged once, for the text is the target's own.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import CheckpointError, DrafterMismatchError
from ..generation.model_parts import decoder_of, named

logger = logging.getLogger(__name__)

FIELD = "target_fingerprint"  # of a drafter's config
SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
KEY_IDS = ("bos_token_id", "eos_token_id")  # padding is the caller's business: nobody drafts it
EMBEDDINGS, HEAD, LAYERS, ADAPTERS = PARTS = ("embeddings", "head", "layers", "adapters")
PACKED = "it is quantised"
Likeness = Literal["same", "rounded", "different", "unrelated"]

NUM_WEIGHTS = 16  # matrices of the layers, from the first to the last
NUM_VALUES = 256  # first values of a row
NUM_SAMPLED = 16  # values of a part that are kept
TABLE_ROWS = (0.13, 0.38, 0.63, 0.88)  # rows of embeddings and head that are read, as fractions of the table
LAYER_ROWS = (0.3, 0.7)
UNRELATED = 0.5  # of the larger norm: samples that lie farther apart are not of one model, trained on or not
ROUNDING = 2**-7  # two roundings to bfloat16 differ by no more, relative ...
ROUNDING_NEAR_ZERO = 2**-24  # ... or as much as float16 leaves of small values

OTHER_TARGET = "other target"
QUANTISED = "quantised target"
OTHER_DTYPE = "other dtype"
WRONG_TEMPLATE = "wrong template"


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
        """Whether the values are the same, differ as rounding to 16 bits makes them differ, or as training on does."""
        if self.digest == other.digest:
            return "same"

        mine, theirs = self._values(), other._values()
        if mine.shape != theirs.shape:
            return "unrelated"

        allowed = ROUNDING * torch.maximum(mine.abs(), theirs.abs()) + ROUNDING_NEAR_ZERO
        if bool(((mine - theirs).abs() <= allowed).all()):
            return "rounded"

        is_related = (mine - theirs).norm() <= UNRELATED * torch.maximum(mine.norm(), theirs.norm())
        return "different" if bool(is_related) else "unrelated"

    def _values(self) -> Tensor:
        try:
            return torch.frombuffer(bytearray.fromhex(self.sample), dtype=torch.bfloat16).float()
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"The sample of a target's weights in `{FIELD}` must be hexadecimal, but it is {self.sample!r:.60}. "
                "Set it to null: the target is not compared then."
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
        text = target.config.get_text_config(decoder=True)
        weights, skipped = _read_weights(target)
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
        """What a config stores; without arguments for the chat template where there are none."""
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
                f"`{FIELD}` of a drafter's config must be as training writes it, but reading it fails: "
                f"{type(error).__name__}: {error}. Set it to null: the target is not compared then."
            ) from error


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a pair, above all a target that is not the one that a drafter was made for."""

    name: str  # what `falcon-spec doctor` and `docs/troubleshooting.md` call it
    text: str  # what was found, and what it costs
    remedy: str  # what to do
    is_fatal: bool = False  # drafting with this target makes no sense

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}"


@dataclass(frozen=True)
class _Fact:
    """A difference between two targets; texts are formats, filled from `p`, what `_compared` knows of both."""

    name: str
    holds: Callable[[Any], Any]
    what: str
    cost: str | None  # None: the target is refused
    remedy: str = "Load the target it was trained for, or train the drafter on with this one (`falcon-spec train`)."

    def finding(self, pair: Any) -> Finding:
        """What is told of a pair."""
        cost = "" if self.cost is None else f" The text stays the target's own, but {self.cost}."
        text = f"{self.what}.{cost}".format(p=pair)
        return Finding(self.name, text, self.remedy.format(p=pair), is_fatal=self.cost is None)


COSTS_OF_IDS = {
    "bos_token_id": "slightly fewer drafts to be kept where texts begin",
    "eos_token_id": "what ends a text or a turn hardly ever to be drafted",
}
_EXPECTED_IDS = "This drafter expects of the target {p.here} {p.ids}"
_OTHER_BEGINNING = "expect fewer drafts to be kept, above all where answers begin"
FACTS = (  # in groups: of each the first that holds is told
    (
        _Fact(
            OTHER_TARGET,
            lambda p: p.other_ids and p.likeness.get(EMBEDDINGS) == "unrelated",
            _EXPECTED_IDS + ", and its embeddings are another model's: no draft could be kept",
            None,
            "Load the target it was trained for: {p.made_for}.",
        ),
        _Fact(OTHER_TARGET, lambda p: p.other_ids, _EXPECTED_IDS, "expect {p.cost_of_ids}"),
    ),
    (
        _Fact(
            OTHER_TARGET,
            lambda p: p.expected.shape != p.given.shape,
            "{p.here} is another model than {p.made_for}, which this drafter was made for ({p.sizes})",
            "expect that hardly any draft is kept",
        ),
        _Fact(
            OTHER_TARGET,
            lambda p: not p.likeness and None not in p.revisions and len(p.revisions) > 1,
            "{p.here} is of another revision ({p.given.revision}) than this drafter was made for "
            "({p.expected.revision}), and its weights cannot be looked at",
            "drafts may be kept less often",
        ),
        _Fact(
            OTHER_TARGET,
            lambda p: p.differing and not (p.is_rounding and p.expected.dtype != p.given.dtype),
            "{p.here} is not quite the target this drafter was made for ({p.made_for}): its {p.differing} "
            "differ{p.extent}, as after fine-tuning",
            "expect fewer drafts to be kept, the fewer the more it was trained since",
        ),
    ),
    (
        _Fact(
            OTHER_TARGET,
            lambda p: (ADAPTERS in p.given.weights) != (ADAPTERS in p.expected.weights),
            "{p.here} works {p.adapters}",
            "expect fewer drafts to be kept, as after fine-tuning",
        ),
    ),
    (
        _Fact(
            QUANTISED,
            lambda p: p.given.quantization != p.expected.quantization,
            "{p.here} is quantised ({p.quantizations[0]}) otherwise than the target this drafter was made for "
            "({p.quantizations[1]})",
            "expect somewhat fewer drafts to be kept: its features are rougher",
            "Measure it (`falcon-spec doctor`); training the drafter on with this target helps.",
        ),
        _Fact(
            OTHER_DTYPE,
            lambda p: p.given.dtype != p.expected.dtype,
            "{p.here} computes in {p.given.dtype}, and this drafter was made for it in {p.expected.dtype}",
            "expect slightly fewer drafts to be kept",
            "Load the target with `dtype=torch.{p.expected.dtype}` if that matters.",
        ),
    ),
    (
        _Fact(
            WRONG_TEMPLATE,
            lambda p: None not in (p.expected.template, p.given.template) and p.given.template != p.expected.template,
            "The chat template of {p.here} is not the one that this drafter was trained with",
            _OTHER_BEGINNING,
            "Take the tokenizer of {p.made_for}, or train on with this template.",
        ),
        _Fact(
            WRONG_TEMPLATE,
            lambda p: p.given.template is not None and p.given.template_kwargs != p.expected.template_kwargs,
            "The chat template of {p.here} gets {p.kwargs[0]}, and this drafter was trained with {p.kwargs[1]}",
            _OTHER_BEGINNING,
            "Give `--chat_template_kwargs '{p.kwargs[1]}'`, or train on with these.",
        ),
    ),
)

_CHECKED: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[tuple[str, ...], list[Finding]]]] = WeakKeyDictionary()
_LOGGED: set[tuple[str, str]] = set()  # a drafter's name and a warning; copies of the drafter need not repeat it


def check_fingerprint(
    drafter: Any, target: PreTrainedModel, tokenizer: Any = None, template_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Refuse a target whose ids are other tokens: [`DrafterMismatchError`]. Log once for a pair what else differs."""
    checked = _CHECKED.setdefault(drafter, WeakKeyDictionary()).setdefault(target, {})
    template = tokenizer and template_digest(tokenizer)
    key = (str(target.dtype), str(template), str(template_kwargs), str(getattr(drafter.config, FIELD, None)))
    if key not in checked:
        checked[key] = mismatches_of(drafter, target, tokenizer, template_kwargs)

    for mismatch in checked[key]:
        if mismatch.is_fatal:
            raise DrafterMismatchError(str(mismatch))
        logged = (str(drafter.config._name_or_path), str(mismatch))
        if logged not in _LOGGED:
            _LOGGED.add(logged)
            logger.warning("%s", mismatch)


def mismatches_of(
    drafter: Any, target: PreTrainedModel, tokenizer: Any = None, template_kwargs: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Differences between a target at hand and the one that a drafter was made for; none where none is stored.

    Of a drafter with an adapter, which fits it to another target, only fatal ones. Where `template_kwargs` are not
    known, they are None.
    """
    stored = getattr(drafter.config, FIELD, None)
    if stored is None:
        return []

    expected = TargetFingerprint.from_json(stored)
    known = expected.template_kwargs if template_kwargs is None else template_kwargs
    given = TargetFingerprint.of_target(target, tokenizer, known)
    pair = _compared(expected, given)
    pair.here = named(target)
    pair.made_for = target_name(drafter.config)

    first = [next((fact for fact in group if fact.holds(pair)), None) for group in FACTS]
    found = [fact.finding(pair) for fact in first if fact is not None]
    has_adapter = any("lora_" in name for name, _ in drafter.named_parameters())
    return [mismatch for mismatch in found if mismatch.is_fatal or not has_adapter]


def _compared(expected: TargetFingerprint, given: TargetFingerprint) -> SimpleNamespace:
    """What `FACTS` ask and tell of the target that a drafter was made for, and of the one at hand."""
    parts = [part for part in PARTS if part in expected.weights and part in given.weights]
    likeness = {part: expected.weights[part].likeness(given.weights[part]) for part in parts}
    is_rounding = not {"different", "unrelated"} & {*likeness.values()}
    same = " and ".join(part for part in parts if likeness[part] == "same")

    # A base model and its chat version end texts differently and share all other ids.
    ids = {name: ({*expected.ids.get(name, ())}, {*given.ids[name]}) for name in KEY_IDS}
    other_ids = {name: pair for name, pair in ids.items() if all(pair) and not pair[0] & pair[1]}
    old, new = expected.shape, given.shape
    other_sizes = [name for name in SHAPE if old.get(name) != new.get(name)]
    return SimpleNamespace(
        expected=expected,
        given=given,
        likeness=likeness,
        is_rounding=is_rounding,
        differing=" and ".join(part for part in parts if likeness[part] != "same"),
        extent=", by no more than rounding to 16 bits" * is_rounding + f" ({same} are the same)" * bool(same),
        other_ids=other_ids,
        ids=" and ".join(f"`{name}` to be {_ids(was)} and not {_ids(now)}" for name, (was, now) in other_ids.items()),
        cost_of_ids=" and ".join(COSTS_OF_IDS[name] for name in other_ids),
        sizes=", ".join(
            f"{name} {given.shape.get(name)} instead of {expected.shape.get(name)}" for name in other_sizes
        ),
        revisions={expected.revision, given.revision},
        adapters="with adapters that this drafter was not made with"
        if ADAPTERS in given.weights
        else "without the adapters that this drafter was made with",
        quantizations=[each.quantization or "not at all" for each in (given, expected)],
        kwargs=[json.dumps(each.template_kwargs) for each in (given, expected)],
    )


def _ids(ids: set[int]) -> str:
    return " or ".join(map(str, sorted(ids)))


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

    for part, weights in _weights_by_part(model).items():
        reasons = [*filter(None, map(_why_unreadable, weights))] if weights else ["there are none"]
        if reasons:
            skipped[part] = reasons[0]
            continue
        fractions = TABLE_ROWS if part in (EMBEDDINGS, HEAD) else LAYER_ROWS
        rows: list[Tensor] = []
        for weight in weights:
            rows += [_row(weight, fraction) for fraction in fractions]
        found[part] = WeightFingerprint.of_values(torch.cat(rows))

    return found, skipped


def _weights_by_part(model: PreTrainedModel) -> dict[str, list[Any]]:
    """The tables, matrices of the decoder from the first to the last, and what adapters that are on added to them."""
    embeddings = getattr(model.get_input_embeddings(), "weight", None)
    named = dict(decoder_of(model).named_parameters())
    adapted = tuple(name.partition("base_layer.")[0] for name in named if "base_layer." in name)
    own: list[Tensor] = []
    added: list[Tensor] = []

    for name, weight in named.items():
        if weight.dim() > 1 and weight is not embeddings:
            is_added = name.startswith(adapted) and "base_layer." not in name
            (added if is_added else own).append(weight)

    parts: dict[str, list[Any]] = {
        EMBEDDINGS: [embeddings],
        HEAD: [getattr(model.get_output_embeddings(), "weight", None)],
    }
    parts[LAYERS] = _spread(own)
    layers: Any = [layer for layer in model.modules() if hasattr(layer, "base_layer")]
    if any(layer.active_adapters and not layer.disable_adapters for layer in layers):  # switched on
        parts[ADAPTERS] = _spread(added)

    return parts


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
