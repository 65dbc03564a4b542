"""What a format is: a table of fields and names of weights, which one reader and one writer go through.

A [`Format`] has a row for each field of the drafter's config: what the foreign config calls it, what its values must
be, and its name here. Its `names` say the same of the weights. A new format is one more table in `formats.py`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ..drafters.base import DrafterModel
from ..drafters.config_fields import target_fields
from ..errors import CheckpointError, DrafterMismatchError
from ..generation.model_parts import named

NUM_NAMED = 8  # names shown in a message
NEEDED: Any = object()  # in place of the default of a field that must be given
Fields = dict[str, Any]

# What the values of a field must be.
ANY = "given"
FLAG = "true or false"
WHOLE = "a whole number"
SIZE = "a positive whole number"
FACTOR = "a number above 0"
_FITS: dict[str, Callable[[Any], bool]] = {
    ANY: lambda value: value is not None,
    FLAG: lambda value: isinstance(value, bool),
    WHOLE: lambda value: type(value) is int,
    SIZE: lambda value: type(value) is int and value > 0,
    FACTOR: lambda value: type(value) in (int, float) and 0 < value < float("inf"),
}


@dataclass(frozen=True)
class Checkpoint:
    """The content of a foreign checkpoint, and the target that its drafter is for, if one was named."""

    name: str  # the folder or Hub id, as the user gave it
    config: Mapping[str, Any]  # with the mask that the tokenizer names
    tensors: Mapping[str, Tensor]  # by their foreign names; all are finite
    files: Mapping[str, str]  # SHA-256 of every file that was read, by name
    folder: Path  # where they lie
    target: PreTrainedModel | None = None

    def value(self, name: str, kind: str = ANY, default: Any = NEEDED, unset: Any = None) -> Any:
        """The value of a field of the config, which must be of its kind; null leaves it out."""
        value = self.config.get(name)
        if value in (None, unset) and default is not NEEDED:
            return default

        if not _FITS[kind](value):
            raise CheckpointError(
                f"`{name}` of the config of `{self.name}` must be {kind}, but it is {value!r}. Fetch the "
                "`config.json` of the drafter itself."
            )
        return value


@dataclass(frozen=True)
class Row:
    """A line of a table: fields of a drafter's config, read from a foreign config and written there.

    `read` takes the checkpoint and the fields of the rows above, and `write` takes the drafter's config. A row that
    only checks reads nothing.
    """

    read: Callable[[Checkpoint, Fields], Fields | None]
    write: Callable[[Any], Fields] = lambda _config: {}


def one(name: str, kind: str = ANY, default: Any = NEEDED, here: str = "", unset: Any = None) -> Row:
    """One field.

    Args:
        name (`str`): Its name in the foreign config.
        kind (`str`): What its values must be.
        default (*optional*): What holds where none is given: a value, or a function of the fields above. None leaves
            it to the drafter's config.
        here (`str`, *optional*): Its name in the drafter's config, if that is another one.
        unset (*optional*): A value that says as much as none.
    """
    own = here or name

    def read(source: Checkpoint, fields: Fields) -> Fields:
        value = source.value(name, kind, default, unset)
        if callable(value):
            return {own: value(fields)}
        return {} if value is None else {own: value}

    return Row(read, lambda config: {name: getattr(config, own)})


def here(**fields: Any) -> Row:
    """Fields that all drafters of a format have alike, and of which the foreign config says nothing."""
    return Row(lambda _source, _fields: fields)


def there(**fields: Any) -> Row:
    """Fields that the foreign config must have, and on which nothing here depends."""
    return Row(lambda _source, _fields: None, lambda _config: fields)


def only(wanted: Mapping[str, Any], why: str = "drafters here compute nothing else") -> Row:
    """Fields of the foreign config that may be missing and can have one value alone, or that of a field above."""

    def check(source: Checkpoint, fields: Fields) -> None:
        for name, value in wanted.items():
            expected = value(fields) if callable(value) else value
            found = source.config.get(name)
            if found not in (None, expected):
                raise CheckpointError(
                    f"`{name}` must be {expected!r} to be converted, but the config of `{source.name}` says "
                    f"{found!r}: {why}."
                )

    return Row(check)


def inside(place: str, *rows: Row, view: Callable[[Checkpoint], Fields] | None = None, is_needed: bool = True) -> Row:
    """Rows about an object inside the config, or about what `view` makes of that."""

    def read(source: Checkpoint, fields: Fields) -> Fields:
        found = source.config.get(place)
        if found is None and not is_needed:
            found = {}
        if not isinstance(found, Mapping):
            raise CheckpointError(
                f"`{place}` of the config of `{source.name}` must be an object, but it is {found!r}. Fetch the "
                "`config.json` of the drafter itself."
            )

        inner = replace(source, config=found)
        if view is not None:
            inner = replace(inner, config=view(inner))
        return read_rows(rows, inner, fields)

    return Row(read, lambda config: {place: write_rows(rows, config)})


def seen_as(
    view: Callable[[Checkpoint], Fields], *rows: Row, back: Callable[[Fields], Fields] = lambda fields: fields
) -> Row:
    """Rows about what `view` makes of the config; `back` makes the config of what they write."""
    return Row(
        lambda source, fields: read_rows(rows, replace(source, config=view(source)), fields),
        lambda config: back(write_rows(rows, config)),
    )


def read_rows(rows: tuple[Row, ...], source: Checkpoint, fields: Fields) -> Fields:
    """Read several rows, in their order."""
    found: Fields = {}
    for row in rows:
        found |= row.read(source, {**fields, **found}) or {}
    return found


def write_rows(rows: tuple[Row, ...], config: Any) -> Fields:
    """Write several rows."""
    written: Fields = {}
    for row in rows:
        written |= row.write(config)
    return written


@dataclass(frozen=True)
class Format:
    """A format of checkpoints of other software.

    Args:
        name (`str`): Its name in records and messages.
        drafter (`type[DrafterModel]`): What its checkpoints become.
        is_marked (`Callable`): Whether a config and the names of weights are of this format.
        rows (`tuple[Row, ...]`): The fields of the drafter's config.
        names (`Mapping[str, str]`): How names of weights begin, by how they begin here. The first that fits counts;
            weights of other names are called alike on both sides.
        droppable (`Mapping[str, str]`): Weights that may be there, though drafts do not depend on them, and why.
        optional (`Callable`): Parts of the names, here, of weights that may be missing. Those that `complete` does not
            give are zero.
        complete (`Callable`): Checks what the weights say, and returns those to add or to replace.
        make (`Callable`): Makes the config of the fields, where the target's are not simply added to them.
    """

    name: str
    drafter: type[DrafterModel]
    is_marked: Callable[[Mapping[str, Any], Collection[str]], bool]
    rows: tuple[Row, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    droppable: Mapping[str, str] = field(default_factory=dict)
    optional: Callable[[Checkpoint], tuple[str, ...]] = lambda _source: ()
    complete: Callable[[Checkpoint, Any], dict[str, Tensor]] = lambda _source, _config: {}
    make: Callable[[Checkpoint, Fields], PreTrainedConfig] | None = None

    def name_there(self, name: str) -> str:
        """What the format calls a weight of the drafter."""
        for here, there in self.names.items():
            if name.startswith(here):
                return there + name.removeprefix(here)
        return name


def read_config(table: Format, source: Checkpoint) -> Any:
    """The config of the drafter: what the rows read, and what the target says of itself.

    Raises:
        [`CheckpointError`]: a field is missing or has a value that the format does not know.
        [`DrafterMismatchError`]: the target has other sizes.
    """
    fields = read_rows(table.rows, source, {})
    if table.make is not None:
        return table.make(source, fields)

    size = fields.get("vocab_size")
    if source.target is not None:
        fields |= target_fields(source.target)
        check_size("a vocabulary", size or fields["vocab_size"], fields["vocab_size"], source.target)
    elif size is None:
        raise needs_target("how large the vocabulary is")
    config_class: Any = table.drafter.config_class
    return config_class(**fields)


def check_size(what: str, expected: int, found: int, target: PreTrainedModel) -> None:
    """Check that the target has a size for which the drafter was made."""
    if expected != found:
        raise DrafterMismatchError(
            f"This drafter expects {what} of size {expected}, but the target {named(target)} "
            f"gives {found}. Take the target that it was trained for."
        )


def needs_target(what: str) -> CheckpointError:
    """The error for a checkpoint that lacks a fact which only the target's config can give."""
    return CheckpointError(
        f"A conversion must know {what}, but the source does not say it. Name the target that the drafter was trained "
        f"for, a folder or Hub id: `--target NAME`."
    )


def read_by_table(table: Format, source: Checkpoint) -> tuple[DrafterModel, dict[str, str], dict[str, float]]:
    """Read a checkpoint by the table of its format.

    No weight of the format may be missing, and none may be left over. The weights get the smallest floating point type
    that holds all of them.

    Returns:
        `tuple`: the drafter that the checkpoint becomes, weights that were left out, each with the reason, and the
            values of weights that the source does without.
    """
    config = read_config(table, source)
    with torch.device("meta"):  # no memory, no draws: all weights come from the checkpoint
        drafter: Any = table.drafter(config)
    expected = drafter.state_dict(keep_vars=True)

    first: dict[int, str] = {}  # of weights that parts share, the first name
    names = {}
    for name, weight in expected.items():
        if first.setdefault(id(weight), name) == name:
            names[name] = table.name_there(name)

    parts = table.optional(source)
    optional = set()
    needed = set()
    for name, there in names.items():
        if any(part in name for part in parts):
            optional.add(name)
        else:
            needed.add(there)

    droppable = {name: why for name, why in table.droppable.items() if name not in names.values()}
    _check_names(source, needed, {*map(table.name_there, expected), *droppable})

    weights = {}
    for name, there in names.items():
        if there in source.tensors:
            weights[name] = _without_ones(source.tensors[there], expected[name])
    _check_shapes(source, table, weights, expected)
    weights |= table.complete(source, config)
    dtype = reduce(torch.promote_types, [each.dtype for each in weights.values() if each.is_floating_point()])
    zeros = sorted(optional - set(weights))
    for name in zeros:
        weights[name] = torch.zeros(expected[name].shape, dtype=dtype)

    times = Counter(weight.data_ptr() for weight in weights.values())
    for name, weight in weights.items():
        is_copied = times[weight.data_ptr()] > 1  # Medusa files hold one weight under several names
        own = weight.to(dtype if weight.is_floating_point() else weight.dtype, copy=is_copied)
        weights[name] = own.contiguous()

    drafter.load_state_dict(weights, assign=True, strict=False)  # the other names of shared weights are not there
    drafter.tie_weights()
    drafter.config.dtype = dtype
    dropped = {name: why for name, why in droppable.items() if name in source.tensors}
    return drafter, dropped, dict.fromkeys(zeros, 0.0)


def _check_names(source: Checkpoint, needed: set[str], known: set[str]) -> None:
    """Check that no weight is missing, and that none is left over."""
    found = set(source.tensors)
    wrong = {"missing": needed - found, "unexpected": found - known}
    if any(wrong.values()):
        said = [f"{kind}: {shortened(names)}" for kind, names in wrong.items() if names]
        raise CheckpointError(
            f"`{source.name}` must hold exactly the weights of its format, but there are {'; '.join(said)}. "
            "Check that config and weights belong together and that no weight was renamed."
        )


def _check_shapes(
    source: Checkpoint, table: Format, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Check the shapes of weights, and whether they are floating point numbers."""
    wrong = {}
    for name, found in weights.items():
        like = expected[name]
        if found.shape != like.shape or found.is_floating_point() != like.is_floating_point():
            wrong[table.name_there(name)] = f"{_described(found)} instead of {_described(like)}"
    if wrong:
        raise CheckpointError(
            f"The weights of `{source.name}` must have the shapes that its config says, but these do not: "
            f"{shortened(wrong)}. Check that config and weights belong together."
        )


def _without_ones(weight: Tensor, like: Tensor) -> Tensor:
    """The weight in the shape that it has here, if the two differ by dimensions of size 1 alone."""
    return weight.reshape(like.shape) if weight.squeeze().shape == like.squeeze().shape else weight


def _described(weight: Tensor) -> str:
    """The shape of a weight, and its type unless that is a floating point one."""
    shape = str(tuple(weight.shape))
    return shape if weight.is_floating_point() else f"{shape} of {weight.dtype}"


def shortened(names: Any) -> str:
    """A list of names, or a dictionary, or its first few entries, for an error message."""
    shown = dict(list(names.items())[:NUM_NAMED]) if isinstance(names, dict) else sorted(names)[:NUM_NAMED]
    num_more = len(names) - NUM_NAMED
    return f"{shown} and {num_more} more" if num_more > 0 else f"{shown}"
