"""How a target at hand differs from the one that a drafter was made for, and what that costs.

A target whose ids are other tokens is refused. Other differences are logged once, for the text is the target's own.
"""

import json
import logging
from collections.abc import Iterator, Mapping
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
_OTHER_BEGINNING = "expect fewer drafts to be kept, above all where answers begin"
_TRAIN_ON = "Load the target it was trained for, or train the drafter on with this one (`falcon-spec train`)."


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a pair, above all a target that is not the one that a drafter was made for."""

    name: str  # what `falcon-spec doctor` and `docs/troubleshooting.md` call it
    text: str  # what was found, and what it costs
    remedy: str  # what to do
    is_fatal: bool = False  # drafting with this target makes no sense

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}"


_CHECKED: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[tuple[str, ...], list[Finding]]]] = WeakKeyDictionary()
_LOGGED: set[tuple[str, str]] = set()  # a drafter's name and a warning; copies of the drafter need not repeat it


def check_fingerprint(
    drafter: Any, target: PreTrainedModel, tokenizer: Any = None, template_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Refuse a target whose ids are other tokens: [`DrafterMismatchError`]. Log once for a pair what else differs."""
    checked = _CHECKED.setdefault(drafter, WeakKeyDictionary()).setdefault(target, {})
    template = tokenizer and template_digest(tokenizer)
    key = (str(target.dtype), str(template), str(template_kwargs), str(getattr(drafter.config, FIELD, None)))
    is_new = key not in checked
    if is_new:
        checked[key] = mismatches_of(drafter, target, tokenizer, template_kwargs)
    for mismatch in checked[key]:
        if mismatch.is_fatal:
            raise DrafterMismatchError(str(mismatch))
        logged = (str(drafter.config._name_or_path), str(mismatch))
        if is_new and logged not in _LOGGED:
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
    case = (expected, given, named(target), target_name(drafter.config))
    found = [*_other_ids(*case), *_other_weights(*case), *_other_settings(*case)]
    has_adapter = any("lora_" in name for name, _ in drafter.named_parameters())
    return [mismatch for mismatch in found if mismatch.is_fatal or not has_adapter]


def _costly(name: str, what: str, cost: str, remedy: str = _TRAIN_ON) -> Finding:
    return Finding(name, f"{what}. The text stays the target's own, but {cost}.", remedy)


def _other_ids(expected: TargetFingerprint, given: TargetFingerprint, here: str, made_for: str) -> Iterator[Finding]:
    # A base model and its chat version end texts differently and share all other ids. Where embeddings have nothing in
    # common either, all ids are other tokens.
    both = {name: (set(expected.ids.get(name, ())), set(given.ids[name])) for name in KEY_IDS}
    other = {name: pair for name, pair in both.items() if all(pair) and not pair[0] & pair[1]}
    if not other:
        return
    pairs = " and ".join(f"`{name}` to be {_listed(ids)} and not {_listed(own)}" for name, (ids, own) in other.items())
    what = f"This drafter expects of the target {here} {pairs}"
    embeddings, own_embeddings = (fingerprint.weights.get("embeddings") for fingerprint in (expected, given))
    if embeddings is not None and own_embeddings is not None and not embeddings.is_related(own_embeddings):
        text = f"{what}, and its embeddings are another model's: no draft could be kept."
        yield Finding(OTHER_TARGET, text, f"Load the target it was trained for: {made_for}.", is_fatal=True)
    else:
        yield _costly(OTHER_TARGET, what, f"expect {' and '.join(_COSTS_OF_ID[name] for name in other)}")


def _listed(ids: set[int]) -> str:
    return " or ".join(map(str, sorted(ids)))


def _other_weights(
    expected: TargetFingerprint, given: TargetFingerprint, here: str, made_for: str
) -> Iterator[Finding]:
    like = {part: found.likeness(given.weights[part]) for part, found in expected.weights.items()
            if part in given.weights}  # fmt: skip
    same, other = ([part for part in like if (like[part] == "same") is wanted] for wanted in (True, False))
    is_rounding = "different" not in like.values()
    if expected.shape != given.shape:
        sizes = [(name, given.shape.get(name), expected.shape.get(name)) for name in SHAPE]
        listed = ", ".join(f"{name} {own} instead of {size}" for name, own, size in sizes if own != size)
        what = f"{here} is another model than {made_for}, which this drafter was made for ({listed})"
        yield _costly(OTHER_TARGET, what, "expect that hardly any draft is kept")
    elif not like and None not in (expected.revision, given.revision) and expected.revision != given.revision:
        revisions = f"({given.revision}) than this drafter was made for ({expected.revision})"
        what = f"{here} is of another revision {revisions}, and its weights cannot be looked at"
        yield _costly(OTHER_TARGET, what, "drafts may be kept less often")
    elif other and not (is_rounding and expected.dtype != given.dtype):
        much = ", by no more than rounding to 16 bits" if is_rounding else ""
        rest = f" ({' and '.join(same)} are the same)" if same else ""
        what = f"{here} is not quite the target this drafter was made for ({made_for})"
        what += f": its {' and '.join(other)} differ{much}{rest}, as after fine-tuning"
        yield _costly(OTHER_TARGET, what, "expect fewer drafts to be kept, the fewer the more it was trained since")


def _other_settings(
    expected: TargetFingerprint, given: TargetFingerprint, here: str, made_for: str
) -> Iterator[Finding]:
    has_adapters = ADAPTERS in given.weights
    if has_adapters != (ADAPTERS in expected.weights):
        how, made = ("with", "not made") if has_adapters else ("without the", "made")
        what = f"{here} works {how} adapters that this drafter was {made} with"
        yield _costly(OTHER_TARGET, what, "expect fewer drafts to be kept, as after fine-tuning")
    if given.quantization != expected.quantization:
        own, stored = (fingerprint.quantization or "not at all" for fingerprint in (given, expected))
        what = f"{here} is quantised ({own}) otherwise than the target this drafter was made for ({stored})"
        remedy = "Measure it (`falcon-spec doctor`); training the drafter on with this target helps."
        yield _costly(QUANTISED, what, "expect somewhat fewer drafts to be kept: its features are rougher", remedy)
    elif given.dtype != expected.dtype:
        what = f"{here} computes in {given.dtype}, and this drafter was made for it in {expected.dtype}"
        remedy = f"Load the target with `dtype=torch.{expected.dtype}` if that matters."
        yield _costly(OTHER_DTYPE, what, "expect slightly fewer drafts to be kept", remedy)
    if None not in (expected.template, given.template) and given.template != expected.template:
        what = f"The chat template of {here} is not the one that this drafter was trained with"
        remedy = f"Take the tokenizer of {made_for}, or train on with this template."
        yield _costly(WRONG_TEMPLATE, what, _OTHER_BEGINNING, remedy)
    elif given.template is not None and given.template_kwargs != expected.template_kwargs:
        own, stored = (json.dumps(fingerprint.template_kwargs) for fingerprint in (given, expected))
        what = f"The chat template of {here} gets {own}, and this drafter was trained with {stored}"
        remedy = f"Give `--chat_template_kwargs '{stored}'`, or train on with these."
        yield _costly(WRONG_TEMPLATE, what, _OTHER_BEGINNING, remedy)
