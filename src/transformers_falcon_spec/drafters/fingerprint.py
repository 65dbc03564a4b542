"""The fingerprint of a target: what a drafter's config keeps of it, and how a target at hand differs from that.

Of the weights it holds digests of a few slices of embeddings, head and layers, which are compared where the target
has the type in which the drafter was trained. What differs is logged once, for the text is the target's own.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import CheckpointError
from ..generation.model_parts import decoder_of, in_layers, named

logger = logging.getLogger(__name__)

FIELD = "target_fingerprint"  # of a drafter's config
SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
EMBEDDINGS, HEAD, LAYERS = PARTS = ("embeddings", "head", "layers")

NUM_WEIGHTS = 16  # matrices of the layers, from the first to the last
NUM_VALUES = 256  # first values of a row
TABLE_ROWS = (0.13, 0.38, 0.63, 0.88)  # rows of embeddings and head that are read, as fractions of the table
LAYER_ROWS = (0.3, 0.7)

OTHER_TARGET = "other target"
WRONG_TEMPLATE = "wrong template"
COSTS_OF_IDS = {  # padding is the caller's business: nobody drafts it
    "bos_token_id": "slightly fewer drafts to be kept where texts begin",
    "eos_token_id": "what ends a text or a turn hardly ever to be drafted",
}
_TRAIN_ON = "Load the target it was trained for, or train the drafter on with this one (`falcon-spec train`)."


@dataclass(frozen=True)
class TargetFingerprint:
    """The facts of a target that a drafter's config stores besides name and vocabulary."""

    shape: dict[str, Any]  # kind, depth and widths
    dtype: str  # when the drafter was made or trained, such as "bfloat16"
    template: str | None = None  # digest of the chat template; None where no tokenizer was at hand
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # with which the chat template was used
    ids: dict[str, list[int]] = field(default_factory=dict)  # special ids; after training those of the tokenizer
    weights: dict[str, dict[str, str]] = field(default_factory=dict)  # the `digest` of each part that could be read
    revision: str | None = None  # the commit on the Hub; None for a folder

    @classmethod
    def of_target(
        cls, target: PreTrainedModel, tokenizer: Any = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> "TargetFingerprint":
        """The fingerprint of a target as it is; cheap for any size, for a few thousand values are read."""
        text = target.config.get_text_config(decoder=True)
        ids = {}
        for name in COSTS_OF_IDS:
            special = getattr(text, name, None)
            ids[name] = [special] if isinstance(special, int) else sorted(set(special or ()))

        return cls(
            shape={name: in_layers(text, name)[0] for name in SHAPE},
            dtype=str(target.dtype).removeprefix("torch."),
            template=template_digest(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerBase) else None,
            template_kwargs=dict(template_kwargs or {}),
            ids=ids,
            weights=_read_weights(target),
            revision=getattr(target.config, "_commit_hash", None),
        )

    def to_json(self) -> dict[str, Any]:
        """What a config stores; without arguments for the chat template where there are none."""
        stored = asdict(self)
        if not self.template_kwargs:
            del stored["template_kwargs"]

        return stored

    @classmethod
    def from_json(cls, stored: Any) -> "TargetFingerprint":
        """The fingerprint that a config stores, which may hold other facts, too."""
        facts = {each.name: stored[each.name] for each in fields(cls) if each.name in stored}
        return cls(**facts)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a pair, above all a target that is not the one that a drafter was made for."""

    name: str  # what `falcon-spec doctor` and `docs/troubleshooting.md` call it
    text: str  # what was found, and what it costs
    remedy: str  # what to do

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}"


_CHECKED: WeakKeyDictionary[Any, dict[str, list[Finding]]] = WeakKeyDictionary()  # by target, and what it is to be
_LOGGED: set[tuple[str, str]] = set()  # a drafter's name and a warning; copies of the drafter need not repeat it


def check_fingerprint(
    drafter: Any, target: PreTrainedModel, tokenizer: Any = None, template_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Log once for a pair how the target differs from the one that the drafter was made for."""
    checked = _CHECKED.setdefault(target, {})
    template = tokenizer and template_digest(tokenizer)
    stored = getattr(drafter.config, FIELD, None)
    key = str((target_name(drafter.config), _has_adapter(drafter), stored, target.dtype, template, template_kwargs))
    if key not in checked:
        checked[key] = mismatches_of(drafter, target, tokenizer, template_kwargs)

    for mismatch in checked[key]:
        logged = (str(drafter.config._name_or_path), str(mismatch))
        if logged not in _LOGGED:
            _LOGGED.add(logged)
            logger.warning("%s", mismatch)


def mismatches_of(
    drafter: Any, target: PreTrainedModel, tokenizer: Any = None, template_kwargs: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Differences between a target at hand and the one that a drafter was made for; none where none is stored.

    An adapter fits a drafter to another target: such a pair has none. Where `template_kwargs` are not known, they are
    None.
    """
    stored = getattr(drafter.config, FIELD, None)
    if stored is None or _has_adapter(drafter):
        return []

    try:
        expected = TargetFingerprint.from_json(stored)
        known = expected.template_kwargs if template_kwargs is None else template_kwargs
        given = TargetFingerprint.of_target(target, tokenizer, known)
        return _differences(expected, given, named(target), target_name(drafter.config))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"`{FIELD}` of a drafter's config must be as training writes it, but reading it fails: "
            f"{type(error).__name__}: {error}. Set it to null: the target is not compared then."
        ) from error


def _has_adapter(drafter: Any) -> bool:
    return any("lora_" in name for name, _ in drafter.named_parameters())


def _differences(expected: TargetFingerprint, given: TargetFingerprint, here: str, made_for: str) -> list[Finding]:
    """What is to be told of two targets, which messages call `made_for` and `here`."""
    found = []

    def tell(name: str, what: str, cost: str, remedy: str = _TRAIN_ON) -> None:
        found.append(Finding(name, f"{what}. The text stays the target's own, but expect {cost}.", remedy))

    for name, cost in COSTS_OF_IDS.items():
        was = set(expected.ids.get(name, ()))
        now = set(given.ids[name])
        if was and now and not was & now:  # a base model and its chat version end texts differently
            what = f"This drafter expects of the target {here} `{name}` to be {_listed(was)} and not {_listed(now)}"
            tell(OTHER_TARGET, what, cost)

    common = [part for part in PARTS if part in expected.weights and part in given.weights]
    differing = [part for part in common if expected.weights[part]["digest"] != given.weights[part]["digest"]]

    if expected.shape != given.shape:
        names = [name for name in SHAPE if expected.shape.get(name) != given.shape.get(name)]
        sizes = ", ".join(f"{name} {given.shape.get(name)} instead of {expected.shape.get(name)}" for name in names)
        what = f"{here} is another model than {made_for}, which this drafter was made for ({sizes})"
        tell(OTHER_TARGET, what, "that hardly any draft is kept")
    elif differing and expected.dtype == given.dtype:
        what = f"{here} is not quite the target this drafter was made for ({made_for}): its {' and '.join(differing)}"
        cost = "fewer drafts to be kept, the fewer the more it was trained since"
        tell(OTHER_TARGET, f"{what} differ, as after fine-tuning", cost)

    cost = "fewer drafts to be kept, above all where answers begin"
    if None not in (given.template, expected.template) and given.template != expected.template:
        what = f"The chat template of {here} is not the one that this drafter was trained with"
        tell(WRONG_TEMPLATE, what, cost, f"Take the tokenizer of {made_for}, or train on with this template.")
    elif given.template is not None and given.template_kwargs != expected.template_kwargs:
        kwargs = [json.dumps(each.template_kwargs) for each in (given, expected)]
        what = f"The chat template of {here} gets {kwargs[0]}, and this drafter was trained with {kwargs[1]}"
        tell(WRONG_TEMPLATE, what, cost, f"Give `--chat_template_kwargs '{kwargs[1]}'`, or train on with these.")

    return found


def _listed(ids: set[int]) -> str:
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


@torch.no_grad()
def _read_weights(model: PreTrainedModel) -> dict[str, dict[str, str]]:
    """Digests of a target's parts, but for those that are offloaded, sharded or quantised."""
    found = {}
    for part, weights in _weights_by_part(model).items():
        if not weights or not all(map(_is_readable, weights)):
            continue

        rows: list[Tensor] = []
        for weight in weights:
            rows += [_row(weight, fraction) for fraction in (LAYER_ROWS if part == LAYERS else TABLE_ROWS)]

        found[part] = {"digest": _digest(torch.cat(rows).view(torch.uint8).numpy().tobytes())}

    return found


def _weights_by_part(model: PreTrainedModel) -> dict[str, list[Any]]:
    """Both tables, and some matrices of the decoder, evenly spread from the first to the last."""
    embeddings = getattr(model.get_input_embeddings(), "weight", None)
    head = getattr(model.get_output_embeddings(), "weight", None)
    matrices = [each for each in decoder_of(model).parameters() if each.dim() > 1 and each is not embeddings]
    num = min(len(matrices), NUM_WEIGHTS)
    spread = [matrices[index * (len(matrices) - 1) // max(num - 1, 1)] for index in range(num)]
    return {EMBEDDINGS: [embeddings], HEAD: [head], LAYERS: spread}


def _is_readable(weight: Any) -> bool:
    """Whether the values of a weight can be read without loading, gathering or unpacking it."""
    if not isinstance(weight, Tensor) or type(weight.data) is not Tensor:
        return False

    return weight.device.type != "meta" and weight.numel() > 0 and weight.is_floating_point()


def _row(weight: Tensor, fraction: float) -> Tensor:
    """The first values of the row at a fraction of each leading axis."""
    while weight.dim() > 1:
        weight = weight[int(fraction * len(weight))]

    return weight[:NUM_VALUES].float().cpu()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
