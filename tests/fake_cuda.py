"""Stand-ins for the calls that capture and time work on CUDA: on a CPU a graph is a tape, an event a moment of the host's clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from tests.tape import Tape


class FakeGraph:
    """A graph that repeats the operations of the run in which it was captured."""

    made: int = 0  # by all of this kind

    def __init__(self) -> None:
        type(self).made += 1
        self._replay: Callable[[], None] | None = None
        self._is_fresh = True

    def replay(self) -> None:
        """Repeat the work; a capture on CUDA runs nothing, so the run on the tape counts as the first replay."""
        assert self._replay is not None
        if not self._is_fresh:
            self._replay()
        self._is_fresh = False

    @classmethod
    @contextmanager
    def captured(cls, graph: "FakeGraph", **_: Any) -> Iterator[None]:
        """What `torch.cuda.graph` does."""
        tape = Tape()
        with tape:
            yield
        graph._replay = tape.replay


class FakeEvent:
    """A moment; `elapsed_time` gives milliseconds, as on CUDA."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.moment = 0.0

    def record(self, _stream: Any = None) -> None:
        self.moment = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1000 * (end.moment - self.moment)


class FakeGenerator:
    """A generator whose state is the text `state`."""

    state = "before"

    def clone_state(self) -> str:
        return self.state

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


class FakeStream:
    """A stream that has nothing to wait for."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _other: Any) -> None:
        pass


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """Repeated work takes the way of CUDA: it is captured once, on a tape, and replayed."""
    from transformers_falcon_spec.generation.static.graph import RepeatedWork  # noqa: PLC0415  after the shape checks

    graphs = type("FakeGraph", (FakeGraph,), {"made": 0})
    fakes = {"CUDAGraph": graphs, "graph": graphs.captured, "Event": FakeEvent, "Stream": FakeStream}
    fakes |= {"stream": nullcontext, "device": nullcontext, "current_stream": FakeStream}
    fakes |= {"default_generators": (FakeGenerator(),), "empty_cache": lambda: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    make = RepeatedWork.__init__

    def made(self: Any, _device: Any, *args: Any, **kwargs: Any) -> None:
        make(self, torch.device("cuda"), *args, **kwargs)

    monkeypatch.setattr(RepeatedWork, "__init__", made)
    return graphs
