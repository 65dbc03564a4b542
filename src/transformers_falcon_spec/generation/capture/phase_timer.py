"""The seconds of the phases of a step on a GPU, taken by the device, so that the host need not wait for them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Measures phases by events on the device; `collect` waits for those that are not over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Measure the work that is given to the device inside."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        start.record(stream)
        try:
            yield
        finally:
            end.record(stream)
            self._events.append((phase, start, end))

    def collect(self) -> dict[str, float]:
        """The seconds of each phase since the last call."""
        seconds: dict[str, float] = {}
        for phase, start, end in self._events:
            end.synchronize()
            seconds[phase] = seconds.get(phase, 0.0) + start.elapsed_time(end) / 1e3
        self._events = []
        return seconds
