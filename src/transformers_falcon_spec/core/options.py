"""Options that know which values they take: each bound is declared once, beside the field and its default.

Example:

```python
>>> @dataclasses.dataclass
... class Sizes:
...     num_nodes: int = option(16, least=2)
>>> check_options(Sizes(num_nodes=1))
Traceback (most recent call last):
    ...
transformers_falcon_spec.errors.OptionError: `num_nodes` must be at least 2, but it is 1.

```
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import OptionError, quoted

ALLOWED = "allowed"  # in the metadata of a field


@dataclass(frozen=True)
class _Allowed:
    """What values an option takes."""

    least: int | float | None = None
    above: int | float | None = None
    most: int | float | None = None
    one_of: tuple[Any, ...] | None = None
    check: Callable[[Any], Any] | None = None

    def holds(self, value: Any) -> bool:
        """Whether a value is within the bounds."""
        if self.one_of is not None:
            return any(type(value) is type(known) and value == known for known in self.one_of)

        if self.least is not None and not value >= self.least:  # as of NaN
            return False

        if self.above is not None and not value > self.above:
            return False

        return self.most is None or value <= self.most

    def __str__(self) -> str:
        if self.one_of is not None:
            return f"be one of {self.one_of}"

        if self.most is None:
            return f"be at least {self.least}" if self.above is None else f"be above {self.above}"

        if self.above is not None:
            return f"lie above {self.above} and up to {self.most}"

        return f"lie in {self.least}..{self.most}"


def option(
    default: Any = dataclasses.MISSING,
    *,
    least: int | float | None = None,
    above: int | float | None = None,
    most: int | float | None = None,
    one_of: tuple[Any, ...] | None = None,
    check: Callable[[Any], Any] | None = None,
    **metadata: Any,
) -> Any:
    """A field of a dataclass with the values that it takes; None, as "not given", is always one of them.

    Args:
        default: Its value where none is given; without it one must be.
        least: The smallest number.
        above: What a number must be larger than.
        most: The largest number.
        one_of: All values that there are.
        check: Called with a value, it raises an error where that cannot be meant.
        metadata: What else there is to say of it, such as its `help`, and how `argparse` reads it.
    """
    metadata[ALLOWED] = _Allowed(least, above, most, one_of, check)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)

    return dataclasses.field(default=default, metadata=metadata)


def check_options(options: Any) -> None:
    """Refuse a dataclass with a value that its field does not take: [`OptionError`], or what its `check` raises."""
    for field in dataclasses.fields(options):
        allowed: _Allowed | None = field.metadata.get(ALLOWED)
        value = getattr(options, field.name)
        if allowed is None or value is None:
            continue

        try:
            holds = allowed.holds(value)
        except TypeError:  # it compares with no number
            holds = False
        if not holds:
            raise OptionError(f"`{field.name}` must {allowed}, but it is {value!r}.")
        if allowed.check is not None:
            allowed.check(value)


def check_known(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options of which `owner` has none of that name: [`OptionError`]."""
    unknown = sorted(set(given).difference(known))
    if unknown:
        raise OptionError(f"`{owner}` has no option {quoted(unknown)}.")
