"""Stand-ins for the calls that capture and time work on CUDA: on a CPU a graph is a tape, an event a moment of the host's clock."""

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import pytest
import torch

from tests.tape import Tape


class FakeGraph:
    """A graph that repeats the operations of the run in which it was captured, and the device that it belongs to.

    The book of pools is that of PyTorch 2.11: a capture that fails leaves its pool as being recorded to, and a pool without graphs cannot
    be opened again (if a tensor lives in it, which is taken for granted here).
    """

    made: int  # graphs, by all of this kind
    num_pools: int
    log: list[str]  # of captures, and of workspaces
    recording: set[Any]  # pools
    graphs: dict[Any, "WeakSet[FakeGraph]"]  # by pool
    sync_debug_mode: int
    capturing: "FakeGraph | None"

    def __init__(self) -> None:
        type(self).made += 1
        self._replay: Callable[[], None] | None = None
        self._is_fresh = True
        self.num_kernels = 0  # operations of a replay
        self.is_broken = False

    @classmethod
    def kind(cls) -> "type[FakeGraph]":
        """A kind of its own for one test."""
        start = {"made": 0, "num_pools": 0, "log": [], "recording": set(), "graphs": defaultdict(WeakSet)}
        return type("FakeGraph", (cls,), {**start, "sync_debug_mode": 0, "capturing": None})

    def replay(self) -> None:
        """Repeat the work; a capture on CUDA runs nothing, so the run on the tape counts as the first replay."""
        assert self._replay is not None
        if not self._is_fresh:
            self._replay()
        self._is_fresh = False

    @classmethod
    @contextmanager
    def captured(cls, graph: "FakeGraph", pool: Any, **_: Any) -> Iterator[None]:
        """What `torch.cuda.graph` does."""
        cls._open(pool)
        cls.log.append("capture begins")
        cls.recording.add(pool)
        cls.capturing, torch.cuda.default_generators[0].state = graph, "capturing"
        tape = Tape()
        try:
            with tape:
                yield
        finally:
            cls.capturing = None
            cls.log.append("capture ends")
            if graph.is_broken:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            cls.recording.discard(pool)
            cls.graphs[pool].add(graph)
            torch.cuda.default_generators[0].state = "before"
        graph._replay, graph.num_kernels = tape.replay, tape.num_kernels

    @classmethod
    def _open(cls, pool: Any) -> None:
        if pool in cls.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if pool in cls.graphs and not cls.graphs[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")

    @classmethod
    def pool_handle(cls) -> tuple[int, int]:
        """What `torch.cuda.graph_pool_handle` does."""
        cls.num_pools += 1
        return 0, cls.num_pools

    @classmethod
    def end_recording(cls, _device: int, pool: Any) -> None:
        """What `torch._C._cuda_endAllocateToPool` does."""
        if pool not in cls.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        cls.recording.remove(pool)

    @classmethod
    def wait(cls) -> None:
        """Ask the device for a value, as `Tensor.item` does there."""
        if cls.capturing is not None:
            cls.capturing.is_broken = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if cls.sync_debug_mode == 1:
            words = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)"
            warnings.warn(words, stacklevel=2)
        if cls.sync_debug_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    @classmethod
    def set_sync_debug_mode(cls, mode: int | str) -> None:
        """What `torch.cuda.set_sync_debug_mode` does."""
        cls.sync_debug_mode = ("default", "warn", "error").index(mode) if isinstance(mode, str) else mode


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

    def wait_event(self, _event: Any) -> None:
        pass

    def record_event(self) -> FakeEvent:
        return FakeEvent(enable_timing=True)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """Repeated work takes the way of CUDA: it is captured once, on a tape, and replayed."""
    from transformers_falcon_spec.generation.capture.graph import RepeatedWork  # noqa: PLC0415  after the shape checks

    graphs = FakeGraph.kind()
    fakes = {"CUDAGraph": graphs, "graph": graphs.captured, "Event": FakeEvent, "Stream": FakeStream}
    fakes |= {"stream": nullcontext, "device": nullcontext, "current_stream": FakeStream}
    fakes |= {"default_generators": (FakeGenerator(),), "empty_cache": lambda: None}
    fakes |= {"graph_pool_handle": graphs.pool_handle, "set_sync_debug_mode": graphs.set_sync_debug_mode}
    fakes |= {"get_sync_debug_mode": lambda: graphs.sync_debug_mode}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    inner = {"_cuda_endAllocateToPool": graphs.end_recording}
    inner |= {"_cuda_clearCublasWorkspaces": lambda: graphs.log.append("workspaces cleared")}
    for name, fake in inner.items():  # which PyTorch without CUDA lacks
        monkeypatch.setattr(torch._C, name, fake, raising=False)
    make = RepeatedWork.__init__

    def made(self: Any, _device: Any, *args: Any, **kwargs: Any) -> None:
        make(self, torch.device("cuda"), *args, **kwargs)

    monkeypatch.setattr(RepeatedWork, "__init__", made)
    return graphs
