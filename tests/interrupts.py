"""Ctrl-C before any line of a block's beginning and end, one line after the other."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any


class Interrupt:
    """Raises `KeyboardInterrupt` before the line of this number of those that run in the package and in `contextlib`."""

    def __init__(self, num_lines: int) -> None:
        self.num_left = num_lines

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name != contextlib.__file__ and "transformers_falcon_spec" not in name:
            return None
        if event == "line":
            self.num_left -= 1
            if self.num_left < 0:
                raise KeyboardInterrupt
        return self


def interrupted_everywhere(block: Callable[[], Any], is_left: bool = True) -> Iterator[int]:
    """Enter and leave a block again and again, interrupted before its first line, its second one, and so on.

    Unless `is_left`, only its beginning is interrupted.
    """
    for number in itertools.count():
        found, before = None, sys.gettrace()
        interrupt = Interrupt(number)
        sys.settrace(interrupt)
        try:
            with block():
                if not is_left:
                    sys.settrace(before)
        except KeyboardInterrupt:
            found = number
        finally:
            sys.settrace(before)
        if found is None:
            return
        yield number
