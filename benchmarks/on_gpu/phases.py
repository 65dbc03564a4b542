"""Where a captured step spends its time: every piece of repeated work inside is timed, by device events on CUDA."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from transformers_falcon_spec.generation.capture.graph import JoinedPieces, RepeatedWork
from transformers_falcon_spec.generation.timed import synchronize

PHASES = ("draft", "read", "accept")
EVENTS, HOST = "device events", "host clock"


@dataclass
class WorkWatch:
    """The pieces of work that ran: marks around each, and the seconds that captures took."""

    by: str  # `EVENTS` or `HOST`
    marks: list[tuple[str, Any, Any]] = field(default_factory=list)  # phase, before, after
    capture_seconds: float = 0.0
    num_captures: int = 0
    uncaptured: set[str] = field(default_factory=set)  # why work could not be captured, and ran as it is

    def mark(self) -> Any:
        """This moment, of the device or of the host."""
        if self.by == HOST:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, after the device has finished."""
        synchronize()
        found: Counter[str] = Counter()
        for phase, start, end in self.marks:
            found[phase] += end - start if self.by == HOST else start.elapsed_time(end) / 1000
        return dict(found)


def phase_of(work: Callable[..., object]) -> str:
    """The phase of a piece of work, by the module and the name of its function; of joined pieces the first phase."""
    if isinstance(work, JoinedPieces):
        return min((phase_of(piece.work) for piece in work.pieces), key=PHASES.index)
    if ".drafters." in work.__module__:
        return "draft"
    name = work.__qualname__.lower()
    return next((phase for phase in PHASES if phase in name), name)


@contextmanager
def watched_work(device: torch.device) -> Iterator[WorkWatch]:
    """Time every piece of repeated work inside; one whose graph is made meanwhile counts as a capture alone."""
    watch, run = WorkWatch(EVENTS if device.type == "cuda" else HOST), RepeatedWork.run

    def watched(self: RepeatedWork, work: Callable[[], None], *proof: Any) -> None:
        before, start = self.capture_seconds, watch.mark()
        run(self, work, *proof)
        if self.failure is not None:
            watch.uncaptured.add(self.failure)
        if self.capture_seconds > before:
            watch.capture_seconds += self.capture_seconds - before
            watch.num_captures += 1
        else:
            watch.marks.append((phase_of(work), start, watch.mark()))

    RepeatedWork.run = watched  # type: ignore[method-assign]  # for the time of the block
    try:
        yield watch
    finally:
        RepeatedWork.run = run  # type: ignore[method-assign]
