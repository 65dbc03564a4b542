"""The contract between a drafter and its target: what the drafter's config remembers of it, and how a target at hand differs.

What cannot work is refused. What may work is told once, with what it costs: the text is the target's own in any case.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import CheckpointError, DrafterMismatchError
from .fingerprint import ADAPTERS, PACKED, Fingerprint, Print

logger = logging.getLogger(__name__)

FIELD = "target_contract"  # of a drafter's config
OTHER_TARGET = "other target"
QUANTISED = "quantised target"
OTHER_DTYPE = "other dtype"
WRONG_TEMPLATE = "wrong template"
_SHAPE = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
_KEY_IDS = ("bos_token_id", "eos_token_id")  # padding is the caller's business: nobody drafts it
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
            shape={name: getattr(text, name, None) for name in _SHAPE},
            dtype=str(target.dtype).removeprefix("torch."),
            quantization=_quantization(target, found),
            revision=getattr(target.config, "_commit_hash", None),
            template=template_digest(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerBase) else None,
            ids={name: sorted(_ids(getattr(text, name, None))) for name in _KEY_IDS},
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


def sign(config: Any, target: PreTrainedModel, tokenizer: Any = None) -> None:
    """Write into a drafter's config which target it is for; configs of stock models, which have no such field, stay as they are."""
    if hasattr(config, FIELD):
        setattr(config, FIELD, TargetContract.of(target, tokenizer).to_json())
        config.target_name_or_path = target.config._name_or_path or config.target_name_or_path


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Tells chat templates apart; no template counts as one."""
    template: Any = tokenizer.chat_template
    text = template.strip() if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_contract(drafter: Any, target: PreTrainedModel, tokenizer: Any = None) -> None:
    """Refuse a target that makes no sense with a drafter, and say once for this pair what else differs.

    Of a drafter with an adapter only what is refused counts: the adapter fits it to another target, of which the config beneath
    does not know.

    Raises:
        [`DrafterMismatchError`]: the target has other special ids.
        [`CheckpointError`]: the contract cannot be read.
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
        words = (str(drafter.config._name_or_path), str(mismatch))
        if is_new and words not in _TOLD:
            _TOLD.add(words)
            logger.warning("%s", mismatch)


def _has_adapter(drafter: Any) -> bool:
    return any("lora_" in name for name, _ in drafter.named_parameters())


_CHECKED: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[tuple[str, ...], list[Mismatch]]]] = WeakKeyDictionary()
_TOLD: set[tuple[str, str]] = set()  # name of a drafter and what was said; copies of it need not say it again


def mismatches_of(drafter: Any, target: PreTrainedModel, tokenizer: Any = None) -> list[Mismatch]:
    """What differs for this drafter: of one with an adapter only what is refused, as [`check_contract`] says.

    Raises:
        [`CheckpointError`]: the contract cannot be read.
    """
    found = mismatches(drafter.config, target, tokenizer)
    return [mismatch for mismatch in found if mismatch.is_fatal or not _has_adapter(drafter)]


def mismatches(config: Any, target: PreTrainedModel, tokenizer: Any = None) -> list[Mismatch]:
    """All that differs between a target at hand and the one of a drafter's config; nothing where the config holds no contract.

    Raises:
        [`CheckpointError`]: the contract cannot be read.
    """
    stored = getattr(config, FIELD, None)
    if stored is None:
        return []
    signed, given = TargetContract.from_json(stored), TargetContract.of(target, tokenizer)
    names = (f"`{target.config._name_or_path}`", f"`{config.target_name_or_path}`")
    found = [
        _other_ids(signed, given, names),
        _other_weights(signed, given, names),
        _adapted(signed, given, names),
        _quantised(signed, given, names),
        _other_dtype(signed, given, names),
        _other_template(signed, given, names),
    ]
    return [mismatch for mismatch in found if mismatch is not None]


def _other_ids(signed: TargetContract, given: TargetContract, names: tuple[str, str]) -> Mismatch | None:
    for name in _KEY_IDS:
        expected, found = set(signed.ids.get(name, ())), set(given.ids[name])
        if expected and found and not expected & found:
            what = f"This drafter expects `{name}` to be {_listed(expected)}, but the target {names[0]} has {_listed(found)}."
            remedy = f"Load the target it was trained for: {names[1]}."
            return Mismatch(OTHER_TARGET, what, remedy, is_fatal=True)
    return None


def _ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _listed(ids: set[int]) -> str:
    return " or ".join(map(str, sorted(ids)))


def _other_weights(signed: TargetContract, given: TargetContract, names: tuple[str, str]) -> Mismatch | None:
    if signed.shape != given.shape:
        both = [f"{name} {given.shape.get(name)} instead of {signed.shape.get(name)}" for name in _SHAPE
                if given.shape.get(name) != signed.shape.get(name)]  # fmt: skip
        what = f"{names[0]} is another model than {names[1]}, which this drafter was made for ({', '.join(both)}). {_EXACT}"
        return Mismatch(OTHER_TARGET, f"{what}, but expect that hardly any draft is kept.", _TRAIN_ON)
    parts = [part for part in signed.weights if part in given.weights]
    if not parts and None not in (signed.revision, given.revision) and signed.revision != given.revision:
        what = f"{names[0]} is of another revision ({given.revision}) than this drafter was made for ({signed.revision}), and its weights"
        return Mismatch(
            OTHER_TARGET, f"{what} cannot be looked at. {_EXACT}, but drafts may be kept less often.", _TRAIN_ON
        )
    like = {part: signed.weights[part].likeness(given.weights[part]) for part in parts}
    is_rounding = signed.dtype != given.dtype and "different" not in like.values()
    differing = [part for part in parts if like[part] != "same"]
    if not differing or is_rounding:
        return None
    same = [part for part in parts if like[part] == "same"]
    rest = f" ({' and '.join(same)} are the same)" if same else ""
    much = "" if "different" in like.values() else ", by no more than rounding to 16 bits"
    what = f"{names[0]} is not quite the target this drafter was made for ({names[1]}): its {' and '.join(differing)} differ{much}{rest}"
    cost = "expect fewer drafts to be kept, the fewer the more it was trained since"
    return Mismatch(OTHER_TARGET, f"{what}, as after fine-tuning. {_EXACT}, but {cost}.", _TRAIN_ON)


def _adapted(signed: TargetContract, given: TargetContract, names: tuple[str, str]) -> Mismatch | None:
    if (ADAPTERS in signed.weights) == (ADAPTERS in given.weights):
        return None
    how = "works with adapters" if ADAPTERS in given.weights else "works without the adapters"
    what = f"{names[0]} {how} that this drafter was {'not ' * (ADAPTERS in given.weights)}made with. {_EXACT}"
    return Mismatch(OTHER_TARGET, f"{what}, but expect fewer drafts to be kept, as after fine-tuning.", _TRAIN_ON)


def _quantised(signed: TargetContract, given: TargetContract, names: tuple[str, str]) -> Mismatch | None:
    if signed.quantization == given.quantization:
        return None
    what = (
        f"{names[0]} is quantised ({given.quantization or 'not at all'}) otherwise than the target this drafter was made for "
        f"({signed.quantization or 'not at all'}). {_EXACT}, but expect somewhat fewer drafts to be kept: its features are rougher."
    )
    return Mismatch(
        QUANTISED, what, "Measure it (`falcon-spec doctor`); training the drafter on with this target helps."
    )


def _other_dtype(signed: TargetContract, given: TargetContract, names: tuple[str, str]) -> Mismatch | None:
    if signed.dtype == given.dtype or signed.quantization != given.quantization:
        return None
    what = (
        f"{names[0]} computes in {given.dtype}, and this drafter was made for it in {signed.dtype}. {_EXACT}, but expect slightly "
        "fewer drafts to be kept."
    )
    return Mismatch(OTHER_DTYPE, what, f"Load the target with `dtype=torch.{signed.dtype}` if that matters.")


def _other_template(signed: TargetContract, given: TargetContract, names: tuple[str, str]) -> Mismatch | None:
    if None in (signed.template, given.template) or signed.template == given.template:
        return None
    what = (
        f"The chat template of {names[0]} is not the one that this drafter was trained with. {_EXACT}, but expect fewer drafts to be kept, "
        "above all where answers begin."
    )
    return Mismatch(WRONG_TEMPLATE, what, f"Take the tokenizer of {names[1]}, or train on with this template.")


def _quantization(target: PreTrainedModel, found: Fingerprint) -> str | None:
    """How a target is quantised: as its config says, else as its weights look."""
    config: Any = getattr(target.config, "quantization_config", None)
    if config is not None:
        stored = config if isinstance(config, dict) else vars(config)
        method = stored.get("quant_method") or type(config).__name__
        return str(getattr(method, "value", method))
    return "in place" if PACKED in found.skipped.values() else None
