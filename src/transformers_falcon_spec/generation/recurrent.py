"""Recurrent layers of a target: a state holds all tokens that were read, so drafted ones must be taken back.

The states are put aside before a draft is read. Where it is cut, they are put back, and the *mixers* alone, which are
the modules that update them, read the kept tokens again, with the inputs that they had in the read.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import TargetError
from .cache import is_recurrent

_UPDATES = ("update_conv_state", "update_recurrent_state")
_STATES = ("conv_states", "recurrent_states")


class StatesAside:
    """A copy of the recurrent states that a cache holds."""

    def __init__(self, cache: Any) -> None:
        self._copies: list[tuple[Any, str, dict[int, Any]]] = []
        for layer in filter(is_recurrent, cache.layers):
            for name in _STATES:
                copies = {key: None if state is None else state.clone() for key, state in getattr(layer, name).items()}
                self._copies.append((layer, name, copies))
            self._copies.append((layer, "has_previous_state", dict(layer.has_previous_state)))

    def put_back(self) -> None:
        """Let the cache hold them again; states that were not there are begun anew by the next forward."""
        for layer, name, copies in self._copies:
            held = getattr(layer, name)
            for key, value in copies.items():
                if isinstance(value, Tensor):
                    held[key].copy_(value)
                elif isinstance(value, bool):
                    held[key] = value


class RecurrentStates:
    """The recurrent states of the texts of one call."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._layers = list(filter(is_recurrent, cache.layers))
        self._mixers: set[nn.Module] = set()
        self._calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []  # of mixers, in the newest read
        self._aside: StatesAside | None = StatesAside(cache)  # of before the newest read, until that is cut or kept

    @contextmanager
    def finding_mixers(self) -> Iterator[None]:
        """Inside, note which modules update the states."""
        for layer in self._layers:
            for name in _UPDATES:
                setattr(layer, name, self._noting(getattr(layer, name)))
        try:
            yield
        finally:
            for layer in self._layers:
                for name in _UPDATES:
                    delattr(layer, name)

    def _noting(self, update: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while not isinstance(frame.f_locals.get("self"), nn.Module):
                assert frame.f_back is not None  # a module has called the cache
                frame = frame.f_back
            self._mixers.add(frame.f_locals["self"])
            return update(*args, **kwargs)

        return noted

    def _record(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_ours = any(value is self._cache for value in (*args, *kwargs.values()))  # and not of another thread
        if is_ours:
            self._calls.append((mixer, args, kwargs))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a read of tokens of which some may be taken back."""
        self._calls = []
        self._aside = StatesAside(self._cache)
        hooks = [mixer.register_forward_pre_hook(self._record, with_kwargs=True) for mixer in self._mixers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if {mixer for mixer, _, _ in self._calls} != self._mixers:
            raise TargetError("modules that update recurrent states are not handed the cache")

    def keep(self, num_kept: int, num_read: int) -> None:
        """Take back all but the first tokens of the newest read."""
        if num_kept < num_read:
            assert self._aside is not None  # a root alone is never taken back
            self._aside.put_back()
            for mixer, args, kwargs in self._calls if num_kept else ():
                mixer(*_first(args, num_kept, num_read), **_first(kwargs, num_kept, num_read))
        self._calls = []
        self._aside = None


def _first(value: Any, num: int, num_read: int) -> Any:
    """The part of a mixer's inputs that belongs to the first tokens of those that were read."""
    if isinstance(value, tuple | list):
        return type(value)(_first(each, num, num_read) for each in value)
    if isinstance(value, dict):
        return {name: _first(each, num, num_read) for name, each in value.items()}
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value

    axis = 0 if value.dim() == 1 else 1  # of the tokens
    return value.narrow(axis, 0, num) if value.shape[axis] == num_read else value
