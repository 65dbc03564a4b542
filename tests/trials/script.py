"""The program that repeats a trial: it holds the call itself, so that it outlives changes of what a seed stands for."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from tests.trials.call import Call
from tests.trials.trial import trial

_TEMPLATE = '''"""Repeats one trial. Run it from the project's root: `PYTHONPATH=. python THIS_FILE`."""

from tests.trials.call import Call
from tests.trials.trial import trial

call = {call}
print(trial(call))
'''


def script(call: Call) -> str:
    """A program that makes the call and prints what came of it."""
    return _TEMPLATE.format(call=repr(call))


def smallest(call: Call) -> Call:
    """A simpler call with an outcome of the same kind: one thing after the other is left out, if it is not needed for that."""
    kind, usual = trial(call).kind, Call()
    for name in (each.name for each in fields(Call) if each.name not in {"seed", "fault", "num_cached"}):
        for other in _simpler(call, name, getattr(usual, name)):
            if trial(other).kind == kind:
                call = other
                break
    return call


def _simpler(call: Call, name: str, simplest: Any) -> Iterator[Call]:
    """The call with a field as in the simplest one, or with no more than one entry of it."""
    value = getattr(call, name)
    if value == simplest:
        return
    yield replace(call, **{name: simplest}, **({"num_cached": 0} if name == "cache" else {}))
    if isinstance(value, dict):
        yield from (replace(call, **{name: {**simplest, key: value[key]}}) for key in value if key not in simplest)
        yield from (replace(call, **{name: _without(value, key)}) for key in value if key not in simplest)
    elif isinstance(value, tuple):
        yield from (replace(call, **{name: (each,)}) for each in value)


def _without(options: dict[str, object], name: str) -> dict[str, object]:
    return {other: value for other, value in options.items() if other != name}
