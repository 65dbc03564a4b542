"""Converting a checkpoint: it is read, its format detected, and the drafter written with a record of its source."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from ..drafters.base import DrafterModel
from ..drafters.registry import converter_of
from ..errors import CheckpointError, FalconSpecError
from ..provenance import provenance
from .formats import Format, detect, shortened
from .new_folder import check_is_new, new_folder
from .source import Checkpoint, read_checkpoint
from .target_facts import is_same_weight, read_target, weight_of
from .vocabulary import read_object

EMBEDDINGS = "embed_tokens.weight"  # a copy of the target's, or the drafter's own
COMPARED = "which equals the target's"
FOR_TRAINING = "which only the training of the source reads"
# What speculators keeps of the target beside a drafter.
TRAINING_COPIES = dict.fromkeys(("verifier_norm.weight", "verifier_lm_head.weight"), FOR_TRAINING)
RECORD = "conversion.json"  # written last: a folder that holds it is whole
# What a config with a value of another kind, or of none that is possible, makes Python, Transformers and torch raise.
_UNREADABLE = (StrictDataclassError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
logger = logging.getLogger(__name__)


def convert_checkpoint(
    source: str | Path,
    dest: str | Path,
    target: str | PreTrainedModel | None = None,
    revision: str | None = None,
) -> Format:
    """Write a foreign checkpoint as a drafter that `from_pretrained` loads.

    Args:
        source (`str` or `Path`): A folder, or the id of a Hub repository.
        dest (`str` or `Path`): The folder to write; new or empty.
        target (`str` or [`~transformers.PreTrainedModel`], *optional*):
            The target that the drafter was trained for, or its folder or Hub id. Its config is read, for diffusion
            models its tokenizer, too; sizes and tokens must fit. Embeddings that the source brings are compared with
            the target's.
        revision (`str`, *optional*): Branch, tag or commit of the source on the Hub.

    Returns:
        [`Format`]: what the source was.

    Raises:
        [`CheckpointError`]: the source is no whole checkpoint of a format that can be converted.
        [`DrafterMismatchError`]: `target` has other sizes than the drafter was made for.
        [`OptionError`]: `dest` is taken, or `target` is no language model.

    Example:

    ```python
    >>> convert_checkpoint("models/falcon-reference", "unused")
    Traceback (most recent call last):
        ...
    transformers_falcon_spec.errors.CheckpointError: `SOURCE` must be a checkpoint of other software, ...

    ```
    """
    dest = Path(dest)
    check_is_new(dest)
    facts = read_target(target) if isinstance(target, str) else target
    checkpoint = read_checkpoint(str(source), revision)
    with _readable_config(checkpoint.name):
        kind = detect(checkpoint.config, {name: tuple(value.shape) for name, value in checkpoint.tensors.items()})
        conversion = converter_of(kind.value)(checkpoint, facts)
        drafter = _build_drafter(conversion, checkpoint)
    _write(drafter, conversion, dest, checkpoint, kind)
    return kind


@contextmanager
def _readable_config(name: str) -> Iterator[None]:
    """Inside, values of a config that no drafter can have are refused in words."""
    try:
        yield
    except FalconSpecError:
        raise
    except _UNREADABLE as error:
        said = " ".join(str(error).split())[:300].rstrip(".")
        raise CheckpointError(
            f"The config of `{name}` must give values that its format can have, but reading it fails: "
            f"{type(error).__name__}: {said}. Fetch the `config.json` of the drafter itself."
        ) from error


def conversion_of(drafter: DrafterModel) -> dict[str, Any]:
    """The record beside the weights that a drafter was loaded from; an empty one where nothing was converted."""
    is_optional: Any = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    name = drafter.config._name_or_path
    found = cached_file(name, RECORD, **is_optional) if name else None
    return {} if found is None else read_object(Path(found))


@dataclass(frozen=True)
class Conversion:
    """The result of a converter: class, config and weights of the drafter."""

    drafter_class: type[DrafterModel]
    config: PreTrainedConfig
    weights: dict[str, Tensor]  # by the names of this package
    dropped: dict[str, str] = field(default_factory=dict)  # foreign weights, and why drafts do not depend on them
    filled: dict[str, float] = field(default_factory=dict)  # values of weights that the source does not have


def rename_weights(
    checkpoint: Checkpoint, names: dict[str, str], droppable: Mapping[str, str] | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Rename all weights as `names` says, and list the `droppable` ones that are there, each with its reason.

    No other weight may be missing or left over.
    """
    seen = set(checkpoint.tensors)
    droppable = {name: why for name, why in (droppable or {}).items() if name not in names}
    wrong = {"missing": set(names) - seen, "unexpected": seen - set(names) - set(droppable)}
    if any(wrong.values()):
        parts = [f"{kind}: {shortened(found)}" for kind, found in wrong.items() if found]
        raise CheckpointError(
            f"`{checkpoint.name}` must hold exactly the weights of its format, but there are {'; '.join(parts)}. "
            f"Check that config and weights belong together and that no weight was renamed."
        )
    weights = {ours: checkpoint.tensors[theirs] for theirs, ours in names.items()}
    return weights, {name: droppable[name] for name in sorted(seen & set(droppable))}


def is_targets_own(checkpoint: Checkpoint, key: str, target: PreTrainedModel | None, part: str) -> bool | None:
    """Whether a weight equals that of a part of the target; None where there is no such weight to compare with.

    `part` is the method of the target that gives the module: `get_input_embeddings` or `get_output_embeddings`.
    """
    theirs = None if target is None else weight_of(target, getattr(target, part)())
    return None if theirs is None else is_same_weight(checkpoint.tensors[key], theirs)


def has_own_embeddings(checkpoint: Checkpoint, target: PreTrainedModel | None) -> bool:
    """Whether the drafter must keep the embeddings that a checkpoint brings: they are not known as the target's."""
    if EMBEDDINGS not in checkpoint.tensors:
        return False
    found = is_targets_own(checkpoint, EMBEDDINGS, target, "get_input_embeddings")
    if found:
        return False
    why = (
        "they differ from the target's" if found is False else "there are no weights of a target to compare them with"
    )
    logger.info("The drafter keeps the embeddings of `%s`: %s.", checkpoint.name, why)
    return True


def check_shape(checkpoint: Checkpoint, key: str, shape: tuple[int, ...]) -> None:
    """Check the shape of a weight, if the checkpoint holds it."""
    found = tuple(checkpoint.tensors[key].shape) if key in checkpoint.tensors else shape
    if found != shape:
        raise _wrong_shapes(checkpoint.name, {key: f"{found} instead of {shape}"})


def _build_drafter(conversion: Conversion, checkpoint: Checkpoint) -> DrafterModel:
    """Build the drafter, with every weight in the smallest dtype that holds all of them."""
    config = conversion.config
    with torch.device("meta"):  # no memory, no draws: all weights come from the checkpoint
        drafter = conversion.drafter_class(config)
    expected = drafter.state_dict()
    assert set(expected) == set(conversion.weights)  # else a converter does not fit its drafter
    foreign = {id(weight): name for name, weight in checkpoint.tensors.items()}
    wrong = {
        foreign[id(weight)]: f"{_describe(weight)} instead of {_describe(expected[key])}"
        for key, weight in conversion.weights.items()
        if _describe(weight) != _describe(expected[key])
    }
    if wrong:
        raise _wrong_shapes(checkpoint.name, wrong)
    floats = [value.dtype for value in conversion.weights.values() if value.is_floating_point()]
    dtype = reduce(torch.promote_types, floats)
    times = Counter(value.data_ptr() for value in conversion.weights.values())
    weights = {  # Medusa files hold one weight under several names: those are copied, but not billions of others
        key: value.to(
            dtype if value.is_floating_point() else value.dtype, copy=times[value.data_ptr()] > 1
        ).contiguous()
        for key, value in conversion.weights.items()
    }
    drafter.load_state_dict(weights, assign=True)
    drafter.tie_weights()
    drafter.config.dtype = dtype
    return drafter


def _describe(weight: Tensor) -> str:
    """Describe the shape of a weight, and its dtype unless that is a floating point one."""
    return f"{tuple(weight.shape)}" + ("" if weight.is_floating_point() else f" of {weight.dtype}")


def _wrong_shapes(name: str, wrong: dict[str, str]) -> CheckpointError:
    return CheckpointError(
        f"The weights of `{name}` must have the shapes that its config says, but these do not: {shortened(wrong)}. "
        f"Check that config and weights belong together."
    )


def _write(drafter: DrafterModel, conversion: Conversion, dest: Path, checkpoint: Checkpoint, kind: Format) -> None:
    """Write the drafter to `dest`: all of its files, or none if anything fails."""
    if conversion.dropped:
        reasons = [f"{name}, {reason}" for name, reason in conversion.dropped.items()]
        logger.info("Left out: %s.", "; ".join(reasons))
    if conversion.filled:
        logger.info("Filled in, because the source does without them: %s.", conversion.filled)
    record = provenance(
        source=checkpoint.name,
        format=kind.value,
        source_sha256=checkpoint.files,
        target=conversion.config.target_name_or_path,
        dropped_weights=sorted(conversion.dropped),
        filled_weights=conversion.filled,
    )
    with new_folder(dest) as folder:
        drafter.save_pretrained(folder)
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
