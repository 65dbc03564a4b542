"""Cases for `parametrize` where all pairs of two facts would prove the same thing again and again."""

from collections.abc import Iterable
from typing import Any


def in_turn(first: Iterable[Any], second: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each of `first` once, with those of `second` in turn."""
    others = list(second)
    return [(one, others[number % len(others)]) for number, one in enumerate(first)]
