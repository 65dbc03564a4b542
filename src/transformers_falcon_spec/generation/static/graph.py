"""Work of fixed shape that is repeated: on CUDA it is captured once and replayed, elsewhere it simply runs."""

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NUM_WARM_UPS = 2  # eager runs before a capture, in which libraries choose kernels and allocate what they keep
_CAPTURING = threading.Lock()  # of the process: two captures at once disturb each other


class RepeatedWork:
    """One piece of work on buffers that stay where they are; a captured graph repeats it without Python.

    The work may read and write the tensors that it knows, and must not ask the host for a value. `state` are tensors
    that it changes, such as lengths: warming up leaves them as they were. While it warms up, `is_open` is False for
    every row, so that work that moves something moves nothing.
    """

    def __init__(self, device: torch.device, state: Sequence[Tensor] = (), is_open: Tensor | None = None) -> None:
        self._device, self._state, self._is_open = device, tuple(state), is_open
        self._graph: torch.cuda.CUDAGraph | None = None
        self.capture_seconds = 0.0

    def run(self, work: Callable[[], None]) -> None:
        """Do the work; every call must be given the same one."""
        if self._device.type != "cuda":
            work()
            return
        if self._graph is None:
            self._capture(work)
        assert self._graph is not None  # just captured
        self._graph.replay()

    def _capture(self, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        changed = self._state if self._is_open is None else (*self._state, self._is_open)
        with _CAPTURING, torch.cuda.device(self._device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            saved = [tensor.clone() for tensor in changed]
            with torch.cuda.stream(stream):
                if self._is_open is not None:
                    self._is_open.zero_()
                for _ in range(NUM_WARM_UPS):
                    work()
                for tensor, before in zip(changed, saved, strict=True):
                    tensor.copy_(before)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                work()
        self._graph, self.capture_seconds = graph, time.perf_counter() - start
