"""A clock for the decoding loop that stands still until it is moved by hand, so that the tuner chooses the same on every machine."""

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

LOOP = "transformers_falcon_spec.generation.loop"
PLAN = "transformers_falcon_spec.generation.plan"
CALLS = "transformers_falcon_spec.generation.call.SpeculativeDecoding"


class HandClock(threading.local):
    """Reading a tree takes a second, whatever its size, and all else no time: drafting always pays, once the costs are known.

    So after the steps of the warm-up the tuner asks for a whole draft in every step, but for one of 96. A test makes drafting dear by
    moving `now` in its drafter. Every thread has a time of its own: what one reads does not make another's drafting dear.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Give it to every call of `generate` with a drafter."""
        loop: Any = sys.modules[LOOP]  # not imported here: the shape checks come first
        patch.setattr(loop.Target, "read", self._timed(loop.Target.read))
        give(patch, self)

    def _timed(self, read: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(read)
        def timed(target: Any, *args: Any, **kwargs: Any) -> Any:
            self.now += 1.0
            return read(target, *args, **kwargs)

        return timed


def give(patch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Let every call of `generate` with a drafter take its time from `clock`."""
    loop: Any = sys.modules[LOOP]
    patch.setattr(CALLS, functools.partial(loop.SpeculativeDecoding, clock=clock))
