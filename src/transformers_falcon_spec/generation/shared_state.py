"""Attributes of models that a call changes while it runs, and that calls in other threads may change with it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LOCK = threading.Lock()
_BEFORE: dict[tuple[int, str], tuple[Any, int]] = {}  # by id of the owner and name: the old value, and running calls


@contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for the time of the block; the last of overlapping calls gives the old value back."""
    key = (id(owner), name)
    with _LOCK:
        before, num_calls = _BEFORE.get(key, (getattr(owner, name), 0))
        _BEFORE[key] = before, num_calls + 1
        if not num_calls and value != before:
            setattr(owner, name, value)
    try:
        yield
    finally:
        with _LOCK:
            before, num_calls = _BEFORE.pop(key)
            if num_calls > 1:
                _BEFORE[key] = before, num_calls - 1
            elif getattr(owner, name) != before:
                setattr(owner, name, before)
