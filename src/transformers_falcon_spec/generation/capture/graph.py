"""Work of fixed shape that is repeated: on CUDA it is captured once and replayed, elsewhere it simply runs."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...core.rounding import error_of, rounding_of
from ..modes import attribute_set, variable_set

Work = Callable[[], None]

NUM_WARM_UPS = 2  # eager runs before a capture, in which libraries choose kernels and allocate what they keep
NUM_TIMED = 3  # replays that are timed together
OFTEN = 64  # times that pieces follow each other until they become one graph, which takes as long as many launches
_WARNING = "called a synchronizing"  # what PyTorch says of an operation for which the host waits
_ABOUT_ITSELF = "Synchronization debug mode"  # what it says of its detector
_CAPTURING = threading.Lock()  # of the process: two captures at once disturb each other


def is_captured(device: torch.device) -> bool:
    """Whether work on a device can be captured."""
    return device.type == "cuda"


_IS_CAPTURING: ContextVar[bool] = ContextVar("is_capturing", default=False)  # whether this thread does


def is_capturing() -> bool:
    """Whether this thread warms work up, or captures it."""
    return _IS_CAPTURING.get()


def batched_experts(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, experts are computed without asking the host how many tokens each has, where that is captured."""
    if not is_captured(model.device) or not model._can_set_experts_implementation():
        return nullcontext()
    config = model.config.get_text_config(decoder=True)
    is_fast = config._experts_implementation == "grouped_mm" and model.dtype == torch.bfloat16  # the one type it has
    return nullcontext() if is_fast else attribute_set(config, "_experts_implementation", "batched_mm")


class Trust:
    """Whether graphs are replayed at all; one object for all graphs of a target and of those who draft for it."""

    doubt: str | None = None  # why none is any more, in words: a replay was wrong


class MemoryPool:
    """Memory that graphs share, which never run at the same time. It is made when it is needed."""

    def __init__(self) -> None:
        self.trust = Trust()
        self.waiting: list[Piece] | None = None  # work that is to be done together; None: all is done at once
        self._handle: Any = None
        self._graphs: WeakSet[Any] = WeakSet()
        self._joined: dict[tuple[ReferenceType[RepeatedWork], ...], JoinedWork] = {}  # by pieces, in their order

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do captured work at the end of the block, in one graph where the same pieces follow each other often.

        Work that is not captured yet is done at once, after what waits. Nothing else inside may need their results.
        """
        self.waiting = []
        try:
            yield
        finally:
            self.launch()

    def flush(self) -> None:
        """Do what waits now."""
        if self.waiting is not None:
            self.launch()
            self.waiting = []

    def launch(self) -> None:
        """Do what waits, and no longer wait."""
        pieces, self.waiting = self.waiting, None
        if not pieces:
            return

        joined = JoinedPieces(pieces)
        work = self._work_of(joined) if len(pieces) > 1 else None
        if work is not None and work.is_due():
            work.run(joined)
        else:
            joined.run_singly()

    def _work_of(self, joined: "JoinedPieces") -> "JoinedWork":
        """The work that is all pieces in one; that of pieces which are no longer there goes."""
        key = tuple(ref(piece.repeated) for piece in joined.pieces)
        if key not in self._joined:
            self._joined = {key: work for key, work in self._joined.items() if all(each() is not None for each in key)}
            state = [tensor for piece in joined.pieces for tensor in piece.repeated._state]
            self._joined[key] = JoinedWork(joined.pieces[0].repeated._device, state, self)
        return self._joined[key]

    @property
    def joined(self) -> "list[JoinedWork]":
        """The work of several pieces for which there is a graph, or cannot be one."""
        held = [work for key, work in self._joined.items() if all(each() is not None for each in key)]
        return [work for work in held if work.is_captured or work.failure is not None]

    @property
    def handle(self) -> Any:
        """PyTorch's name of it; one without graphs cannot be opened again, for tensors may still lie in it."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: Any) -> None:
        """Stay as it is for as long as this graph lives."""
        self._graphs.add(graph)

    def renew(self) -> None:
        """Let the next graphs have another one, since a capture into this one failed."""
        self._graphs = WeakSet()


class CaptureError(Exception):
    """Work that runs could not be captured."""


@lru_cache
def _stream_of(_device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on the present device: graphs of one pool share memory if they share their stream."""
    return torch.cuda.Stream()


def capture(device: torch.device, warm_up: Work, work: Work, pool: MemoryPool) -> Work:
    """Capture work after it was warmed up; what is returned replays it.

    Raises:
        [`CaptureError`]: the work asks the host for something, or there is no memory for it. It was not done.
    """
    with torch.cuda.device(device):
        present, stream = torch.cuda.current_stream(), _stream_of(device)
        stream.wait_stream(present)
        try:
            with torch.cuda.stream(stream):
                _warm_up_and_check(warm_up)
        finally:
            present.wait_stream(stream)
        return _captured(device, work, pool, stream)


def _warm_up_and_check(warm_up: Work) -> None:
    """Warm work up; earlier runs may ask the host for what they keep, the last one for nothing.

    What asks is not captured at all, for a capture that fails costs the process more than itself.
    """
    for _ in range(NUM_WARM_UPS - 1):
        warm_up()
    with host_waits() as places:
        warm_up()
    if places:
        raise CaptureError(f"it asks the host at {' and '.join(places)}")


def _captured(device: torch.device, work: Work, pool: MemoryPool, stream: torch.cuda.Stream) -> Work:
    """Capture work that was warmed up."""
    index, handle = device.index or 0, pool.handle
    generator = torch.cuda.default_generators[index]
    graph, before = torch.cuda.CUDAGraph(), generator.clone_state()
    captured = torch.cuda.graph(graph, pool=handle, stream=stream, capture_error_mode="thread_local")
    reason: str | None = None

    # Workspaces of matrix products are global, and others may free them. One that is made inside lies in the pool.
    torch._C._cuda_clearCublasWorkspaces()

    try:
        with torch.cuda.stream(torch.cuda.current_stream()), captured:  # it stays on its own stream if it fails
            try:
                work()
            except RuntimeError as error:  # the cause; the end of the capture then raises another one
                reason = str(error)
    except RuntimeError as error:
        reason = reason or str(error)
    finally:
        torch._C._cuda_clearCublasWorkspaces()

    if reason is not None:
        generator.graphsafe_set_state(before)  # otherwise it counts draws of a capture that has ended
        pool.renew()
        with suppress(AttributeError, RuntimeError):  # PyTorch 2.12 and before leaves it as being recorded to
            torch._C._cuda_endAllocateToPool(index, handle)
        raise CaptureError(reason)

    pool.add(graph)
    return graph.replay


@dataclass(frozen=True)
class Proof:
    """What shows that a replay does what the work does: both are done on the same inputs, and compared."""

    name: str  # of the work
    changed: Callable[[], Sequence[Tensor]]  # what else the work changes that it reads
    results: Callable[[], Sequence[Tensor]]  # what it writes anew; known once it ran


class Piece(NamedTuple):
    """Work that waits for other work, to be done with it."""

    repeated: "RepeatedWork"
    work: Work
    proof: Proof | None


@dataclass(frozen=True)
class JoinedPieces:
    """The work of pieces that follow each other."""

    pieces: Sequence[Piece]

    def __call__(self) -> None:
        """Do it without graphs."""
        for piece in self.pieces:
            piece.work()

    def run_singly(self) -> None:
        """Do it with the graph of each piece."""
        for piece in self.pieces:
            piece.repeated.run(piece.work, piece.proof)


class RepeatedWork:
    """One piece of work on buffers that stay where they are; a captured graph repeats it without Python.

    The work may read and write the tensors that it knows, and must not ask the host for a value. `state` are tensors
    that it changes, such as lengths: warming up leaves them as they were.
    """

    def __init__(self, device: torch.device, state: Sequence[Tensor] = (), pool: MemoryPool | None = None) -> None:
        self._device, self._state = device, tuple(state)
        self._pool = MemoryPool() if pool is None else pool
        self._replay: Work | None = None
        self.capture_seconds = 0.0
        self.is_proven = False
        self.failure: str | None = None  # why it is not captured, and so runs as it is

    def run(self, work: Work, proof: Proof | None = None) -> None:
        """Do the work; every call must be given the same one. With a `proof` its graph is proven before it is used.

        Whatever is wrong with a graph, the work is done without.
        """
        pool = self._pool
        if pool.waiting is None:
            self._run(work, proof)
        elif self.is_captured and pool.trust.doubt is None:
            pool.waiting.append(Piece(self, work, proof))
        else:
            pool.launch()
            self._run(work, proof)
            pool.waiting = []

    def _run(self, work: Work, proof: Proof | None) -> None:
        if self.failure is None and is_captured(self._device):
            try:
                self._repeat(work, proof)
            except (RuntimeError, CaptureError) as error:
                self._give_up(error)
        if self._replay is None:
            self._do_without(work)

    def _do_without(self, work: Any) -> None:
        """Do the work without its graph."""
        work()

    @property
    def is_captured(self) -> bool:
        """Whether a graph repeats the work."""
        return self._replay is not None

    def replay_seconds(self) -> float | None:
        """Seconds of a replay by the device, of captured work that may be repeated without effect."""
        assert self._replay is not None  # the caller asked
        timer = PhaseTimer(self._device)
        try:
            with timer.measured("replays"):
                for _ in range(NUM_TIMED):
                    self._replay()
        except RuntimeError as error:
            self._give_up(error)
            return None
        return timer.collect()["replays"] / NUM_TIMED

    def _repeat(self, work: Work, proof: Proof | None) -> None:
        if self._pool.trust.doubt is not None:
            raise CaptureError(self._pool.trust.doubt)
        if self._replay is None:
            start = time.perf_counter()
            try:
                self._replay = self._captured(work, proof)
            finally:
                self.capture_seconds = time.perf_counter() - start
        self._replay()

    def _give_up(self, error: Exception) -> None:
        self._replay = None
        self.failure = " ".join(str(error).split()).removesuffix(".")
        torch.cuda.empty_cache()

    def _captured(self, work: Work, proof: Proof | None) -> Work:
        """Warm the work up, capture it and prove it, all of it without effect on the text."""
        changed = [*self._state, *(proof.changed() if proof else ())]
        expected: list[Tensor] = []

        def warm_up() -> None:
            with unchanged(changed):
                self._warm_up(work)
                if proof is not None:
                    expected[:] = [tensor.clone() for tensor in (*changed, *proof.results())]

        with _CAPTURING, variable_set(_IS_CAPTURING, True), unchanged(changed if proof else ()):
            replay = capture(self._device, warm_up, work, self._pool)
            if proof is not None:
                replay()
                self._compare(proof, [*changed, *proof.results()], expected)
                self.is_proven = True

        return replay

    def _compare(self, proof: Proof, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        for replayed, wanted in zip(found, expected, strict=True):
            error, allowed = error_of(replayed, wanted), rounding_of(wanted)
            if error > allowed:
                reason = f"a replay of {proof.name} was off by {error:.2g}, and rounding explains {allowed:.2g}"
                self._doubt(reason)
                raise CaptureError(reason)

    def _warm_up(self, work: Any) -> None:
        work()

    def _doubt(self, reason: str) -> None:
        self._pool.trust.doubt = reason


class JoinedWork(RepeatedWork):
    """Pieces of work that follow each other as one graph. Each has a graph of its own, which is proven."""

    _num_asked = 0

    def is_due(self) -> bool:
        """Whether the pieces have come often, and may be captured; to be asked each time that they come."""
        self._num_asked += 1
        return self._num_asked >= OFTEN and self.failure is None

    def _captured(self, work: Any, proof: Proof | None) -> Work:
        """Capture and prove all pieces; what one of them changes is put back for all."""
        proofs = [piece.proof for piece in work.pieces if piece.proof is not None]
        if proofs:
            proof = Proof(
                " and ".join(each.name for each in proofs),
                changed=lambda: [tensor for each in proofs for tensor in each.changed()],
                results=lambda: [tensor for each in proofs for tensor in each.results()],
            )
        return super()._captured(work, proof)

    def _warm_up(self, work: JoinedPieces) -> None:
        for piece in work.pieces:
            assert piece.repeated._replay is not None  # what waits is captured
            piece.repeated._replay()

    def _do_without(self, work: JoinedPieces) -> None:
        work.run_singly()

    def _doubt(self, reason: str) -> None:
        """The pieces are right, and go on by themselves."""


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """After the block these tensors are what they were."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)


@contextmanager
def host_waits() -> Iterator[dict[str, None]]:
    """Inside, note where this thread waits for the device: files and lines, in order.

    PyTorch's detector belongs to the whole process, and can warn or raise. It warns here, for an error would also end
    what other threads do meanwhile.
    """
    places: dict[str, None] = {}
    own_thread, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    show = warnings.showwarning

    def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any) -> None:
        if _WARNING not in str(message):
            show(message, category, filename, lineno, *more)
        elif threading.get_ident() == own_thread:
            places["/".join(Path(filename).parts[-2:]) + f":{lineno}"] = None

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _ABOUT_ITSELF)
        warnings.filterwarnings("always", _WARNING)
        warnings.showwarning = note  # type: ignore[assignment]  # any further arguments are passed on
        torch.cuda.set_sync_debug_mode("warn")

        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            warnings.showwarning = show


class PhaseTimer:
    """Measures phases by events on the device; `collect` waits for those that are not over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Measure the work that is given to the device inside."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
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
