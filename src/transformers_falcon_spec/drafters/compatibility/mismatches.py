"""How a target at hand differs from the one that a drafter was made for, and what that costs.

A target whose ids are other tokens is refused. Other differences are logged once: the text is the target's own in any
case.
"""

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ...errors import DrafterMismatchError
from ...generation.model_parts import named
from .fingerprint import ADAPTERS, FIELD, KEY_IDS, SHAPE, TargetFingerprint, target_name, template_digest

logger = logging.getLogger(__name__)

OTHER_TARGET = "other target"
QUANTISED = "quantised target"
OTHER_DTYPE = "other dtype"
WRONG_TEMPLATE = "wrong template"

_COSTS_OF_ID = {
    "bos_token_id": "slightly fewer drafts to be kept where texts begin",
    "eos_token_id": "what ends a text or a turn hardly ever to be drafted",
}
_EXACT = "The text stays the target's own"
_TRAIN_ON = "Load the target it was trained for, or train the drafter on with this one (`falcon-spec train`)."


@dataclass(frozen=True)
class Mismatch:
    """One way in which a target is not the one that a drafter was made for.

    Args:
        name (`str`): What `falcon-spec doctor` and `docs/troubleshooting.md` call it.
        text (`str`): What differs, and what it costs.
        remedy (`str`): What to do.
        is_fatal (`bool`): Whether drafting with this target makes no sense.
    """

    name: str
    text: str
    remedy: str
    is_fatal: bool = False

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}"


def check_fingerprint(drafter: Any, target: PreTrainedModel, tokenizer: Any = None) -> None:
    """Refuse a target that makes no sense with a drafter, and log once for this pair what else differs.

    Raises:
        [`DrafterMismatchError`]: the ids of the target are other tokens.
        [`CheckpointError`]: the stored fingerprint cannot be read.
    """
    known = _CHECKED.setdefault(drafter, WeakKeyDictionary()).setdefault(target, {})
    template = tokenizer and template_digest(tokenizer)
    key = (str(target.dtype), str(template), str(getattr(drafter.config, FIELD, None)))
    is_new = key not in known
    if is_new:
        known[key] = mismatches_of(drafter, target, tokenizer)
    for mismatch in known[key]:
        if mismatch.is_fatal:
            raise DrafterMismatchError(str(mismatch))
        logged = (str(drafter.config._name_or_path), str(mismatch))
        if is_new and logged not in _LOGGED:
            _LOGGED.add(logged)
            logger.warning("%s", mismatch)


_CHECKED: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[tuple[str, ...], list[Mismatch]]]] = WeakKeyDictionary()
_LOGGED: set[tuple[str, str]] = set()  # a drafter's name and a warning; copies of the drafter need not repeat it


def mismatches_of(drafter: Any, target: PreTrainedModel, tokenizer: Any = None) -> list[Mismatch]:
    """Differences that matter to this drafter; with an adapter, which fits it to another target, only fatal ones.

    Raises:
        [`CheckpointError`]: the stored fingerprint cannot be read.
    """
    has_adapter = any("lora_" in name for name, _ in drafter.named_parameters())
    return [found for found in mismatches(drafter.config, target, tokenizer) if found.is_fatal or not has_adapter]


def mismatches(config: Any, target: PreTrainedModel, tokenizer: Any = None) -> list[Mismatch]:
    """All that differs between a target at hand and the one of a drafter's config; nothing where none is stored.

    Raises:
        [`CheckpointError`]: the stored fingerprint cannot be read.
    """
    stored = getattr(config, FIELD, None)
    if stored is None:
        return []
    expected, given = TargetFingerprint.from_json(stored), TargetFingerprint.of_target(target, tokenizer)
    names = (named(target), target_name(config))
    checks = (_other_ids, _other_weights, _adapted, _quantised, _other_dtype, _other_template)
    found = [check(expected, given, names) for check in checks]
    return [mismatch for mismatch in found if mismatch is not None]


def _other_ids(expected: TargetFingerprint, given: TargetFingerprint, names: tuple[str, str]) -> Mismatch | None:
    # A base model and its chat version end texts differently and share all other ids. Where embeddings have nothing in
    # common either, all ids are other tokens.
    both = {name: (set(expected.ids.get(name, ())), set(given.ids[name])) for name in KEY_IDS}
    other = {name: pair for name, pair in both.items() if all(pair) and not pair[0] & pair[1]}
    if not other:
        return None
    pairs = " and ".join(
        f"`{name}` to be {_listed(ids)} and not {_listed(here)}" for name, (ids, here) in other.items()
    )
    what = f"This drafter expects of the target {names[0]} {pairs}"
    embeddings, embeddings_here = (fingerprint.weights.get("embeddings") for fingerprint in (expected, given))
    if embeddings is not None and embeddings_here is not None and not embeddings.is_related(embeddings_here):
        text = f"{what}, and its embeddings are another model's: no draft could be kept."
        return Mismatch(OTHER_TARGET, text, f"Load the target it was trained for: {names[1]}.", is_fatal=True)
    costs = " and ".join(_COSTS_OF_ID[name] for name in other)
    return Mismatch(OTHER_TARGET, f"{what}. {_EXACT}, but expect {costs}.", _TRAIN_ON)


def _listed(ids: set[int]) -> str:
    return " or ".join(map(str, sorted(ids)))


def _other_weights(expected: TargetFingerprint, given: TargetFingerprint, names: tuple[str, str]) -> Mismatch | None:
    if expected.shape != given.shape:
        both = [f"{name} {given.shape.get(name)} instead of {expected.shape.get(name)}" for name in SHAPE
                if given.shape.get(name) != expected.shape.get(name)]  # fmt: skip
        what = f"{names[0]} is another model than {names[1]}, which this drafter was made for ({', '.join(both)})."
        return Mismatch(OTHER_TARGET, f"{what} {_EXACT}, but expect that hardly any draft is kept.", _TRAIN_ON)
    parts = [part for part in expected.weights if part in given.weights]
    if not parts and None not in (expected.revision, given.revision) and expected.revision != given.revision:
        revisions = f"({given.revision}) than this drafter was made for ({expected.revision})"
        what = f"{names[0]} is of another revision {revisions}"
        cost = f"and its weights cannot be looked at. {_EXACT}, but drafts may be kept less often."
        return Mismatch(OTHER_TARGET, f"{what}, {cost}", _TRAIN_ON)
    like = {part: expected.weights[part].likeness(given.weights[part]) for part in parts}
    is_rounding = expected.dtype != given.dtype and "different" not in like.values()
    differing = [part for part in parts if like[part] != "same"]
    if not differing or is_rounding:
        return None
    same = [part for part in parts if like[part] == "same"]
    rest = f" ({' and '.join(same)} are the same)" if same else ""
    much = "" if "different" in like.values() else ", by no more than rounding to 16 bits"
    what = f"{names[0]} is not quite the target this drafter was made for ({names[1]})"
    parts_differ = f"its {' and '.join(differing)} differ{much}{rest}, as after fine-tuning"
    cost = "expect fewer drafts to be kept, the fewer the more it was trained since"
    return Mismatch(OTHER_TARGET, f"{what}: {parts_differ}. {_EXACT}, but {cost}.", _TRAIN_ON)


def _adapted(expected: TargetFingerprint, given: TargetFingerprint, names: tuple[str, str]) -> Mismatch | None:
    if (ADAPTERS in expected.weights) == (ADAPTERS in given.weights):
        return None
    how = "works with adapters" if ADAPTERS in given.weights else "works without the adapters"
    what = f"{names[0]} {how} that this drafter was {'not ' * (ADAPTERS in given.weights)}made with. {_EXACT}"
    return Mismatch(OTHER_TARGET, f"{what}, but expect fewer drafts to be kept, as after fine-tuning.", _TRAIN_ON)


def _quantised(expected: TargetFingerprint, given: TargetFingerprint, names: tuple[str, str]) -> Mismatch | None:
    if expected.quantization == given.quantization:
        return None
    what = (
        f"{names[0]} is quantised ({given.quantization or 'not at all'}) otherwise than the target this drafter was "
        f"made for ({expected.quantization or 'not at all'}). {_EXACT}, but expect somewhat fewer drafts to be kept: "
        "its features are rougher."
    )
    return Mismatch(
        QUANTISED, what, "Measure it (`falcon-spec doctor`); training the drafter on with this target helps."
    )


def _other_dtype(expected: TargetFingerprint, given: TargetFingerprint, names: tuple[str, str]) -> Mismatch | None:
    if expected.dtype == given.dtype or expected.quantization != given.quantization:
        return None
    what = (
        f"{names[0]} computes in {given.dtype}, and this drafter was made for it in {expected.dtype}. {_EXACT}, but "
        "expect slightly fewer drafts to be kept."
    )
    return Mismatch(OTHER_DTYPE, what, f"Load the target with `dtype=torch.{expected.dtype}` if that matters.")


def _other_template(expected: TargetFingerprint, given: TargetFingerprint, names: tuple[str, str]) -> Mismatch | None:
    if None in (expected.template, given.template) or expected.template == given.template:
        return None
    what = (
        f"The chat template of {names[0]} is not the one that this drafter was trained with. {_EXACT}, but expect "
        "fewer drafts to be kept, above all where answers begin."
    )
    return Mismatch(WRONG_TEMPLATE, what, f"Take the tokenizer of {names[1]}, or train on with this template.")
