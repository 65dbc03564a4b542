"""Work of fixed shape that is repeated: on CUDA it is captured once and replayed, elsewhere it simply runs."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .phase_timer import PhaseTimer

Work = Callable[[], None]

NUM_WARM_UPS = 2  # eager runs before a capture, in which libraries choose kernels and allocate what they keep
NUM_TIMED = 3  # replays that are timed together
_CAPTURING = threading.Lock()  # of the process: two captures at once disturb each other


def is_captured(device: torch.device) -> bool:
    """Whether work on a device can be captured."""
    return device.type == "cuda"


def memory_pool(device: torch.device) -> Any:
    """A pool of memory for work that never runs at the same time; None where nothing is captured."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class CaptureError(Exception):
    """Work that runs could not be captured."""


@lru_cache
def _stream_of(_device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on the present device: graphs of one pool share memory if they share their stream."""
    return torch.cuda.Stream()


def capture(device: torch.device, warm_up: Work, work: Work, pool: Any = None) -> Work:
    """Capture work after it was warmed up; what is returned replays it.

    Raises:
        [`CaptureError`]: the work asks the host for something, or there is no memory for it. It was not done.
    """
    with torch.cuda.device(device):
        present, stream = torch.cuda.current_stream(), _stream_of(device)
        stream.wait_stream(present)
        try:
            with torch.cuda.stream(stream):
                warm_up()
        finally:
            present.wait_stream(stream)
        generator = torch.cuda.default_generators[device.index or 0]
        graph, before = torch.cuda.CUDAGraph(), generator.clone_state()
        captured = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        try:
            with torch.cuda.stream(present), captured:  # which stays on its own stream if it fails
                work()
        except RuntimeError as error:
            generator.graphsafe_set_state(before)  # otherwise it counts draws of a capture that has ended
            raise CaptureError(str(error)) from error
    return graph.replay


class RepeatedWork:
    """One piece of work on buffers that stay where they are; a captured graph repeats it without Python.

    The work may read and write the tensors that it knows, and must not ask the host for a value. `state` are tensors
    that it changes, such as lengths: warming up leaves them as they were. While it warms up, `is_open` is False for
    every row, so that work that moves something moves nothing.
    """

    def __init__(
        self, device: torch.device, state: Sequence[Tensor] = (), is_open: Tensor | None = None, pool: Any = None
    ) -> None:
        self._device, self._state, self._is_open, self._pool = device, tuple(state), is_open, pool
        self._replay: Work | None = None
        self.capture_seconds = 0.0
        self.failure: str | None = None  # why it could not be captured, and so runs as it is

    def run(self, work: Work) -> None:
        """Do the work; every call must be given the same one."""
        if self._replay is None and self.failure is None and is_captured(self._device):
            self._capture(work)
        if self._replay is None:
            work()
        else:
            self._replay()

    @property
    def is_captured(self) -> bool:
        """Whether a graph repeats the work."""
        return self._replay is not None

    def replay_seconds(self) -> float:
        """Seconds of a replay by the device, of captured work that may be repeated without effect."""
        assert self._replay is not None  # the caller asked
        timer = PhaseTimer(self._device)
        with timer.measured("replays"):
            for _ in range(NUM_TIMED):
                self._replay()
        return timer.collect()["replays"] / NUM_TIMED

    def _capture(self, work: Work) -> None:
        start = time.perf_counter()
        try:
            with _CAPTURING:
                self._replay = capture(self._device, lambda: self._warm_up(work), work, self._pool)
        except (torch.OutOfMemoryError, CaptureError) as error:
            torch.cuda.empty_cache()
            self.failure = " ".join(str(error).split()).removesuffix(".")
        self.capture_seconds = time.perf_counter() - start

    def _warm_up(self, work: Work) -> None:
        """Do the work without effect on the text."""
        changed = self._state if self._is_open is None else (*self._state, self._is_open)
        saved = [tensor.clone() for tensor in changed]
        try:
            if self._is_open is not None:
                self._is_open.zero_()
            for _ in range(NUM_WARM_UPS):
                work()
        finally:
            for tensor, before in zip(changed, saved, strict=True):
                tensor.copy_(before)
