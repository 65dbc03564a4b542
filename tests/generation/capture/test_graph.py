"""Repeated work: it runs as it is on a CPU, and where it can be captured it is warmed up without a trace."""

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests import tape
from tests.doubles import RandomDrafter
from tests.fake_cuda import FakeEvent, FakeGraph, fake_cuda
from tests.runs import both
from tests.tiny import in_double, make_target
from transformers_falcon_spec.generation.capture import graph
from transformers_falcon_spec.generation.capture.graph import MemoryPool, Proof, RepeatedWork
from transformers_falcon_spec.generation.capture.target import FixedTarget
from transformers_falcon_spec.generation.tuning import Tuner

__all__ = ["fake_cuda"]
CPU = torch.device("cpu")


def test_work_simply_runs_on_a_cpu() -> None:
    total = torch.zeros(1)
    work = RepeatedWork(CPU)

    for _ in range(3):
        work.run(lambda: total.add_(1))

    assert total.item() == 3
    assert work.capture_seconds == 0


def test_a_capture_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch)
    total, seen = torch.zeros(1), []
    work = RepeatedWork(CPU, (total,))

    def count() -> None:
        seen.append(total.item())
        total.add_(1)

    for _ in range(4):
        work.run(count)

    assert total.item() == 4
    assert seen == [0] * (graph.NUM_WARM_UPS + 1)  # then Python is out of it
    assert work.capture_seconds > 0


def test_a_tape_finds_what_a_capture_would_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch)
    total, number = torch.zeros(1), 0
    work = RepeatedWork(CPU)

    def frozen() -> None:
        nonlocal number
        number += 1
        total.fill_(number)

    for _ in range(4):
        work.run(frozen)

    assert total.item() == graph.NUM_WARM_UPS + 1


def test_without_memory_for_graphs_the_work_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\n  Tried to allocate 2 GiB")

    monkeypatch.setattr(graph, "is_captured", lambda _device: True)
    monkeypatch.setattr(graph, "capture", fails)
    drafter = RandomDrafter()
    drafter.generation_config.capture = True

    pair = both(in_double(make_target()), drafter)

    pair.assert_equal(is_kept=False)
    assert "Some of the work could not be captured and ran without: CUDA out of memory. Tried to allocate 2 GiB." in (
        pair.stats.notes
    )


def test_work_that_cannot_be_captured_runs_as_it_is(
    fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FixedTarget._read_buffers

    def fails_captured(self: FixedTarget, *args: Any) -> None:
        read(self, *args)
        if fake_cuda.capturing is not None:
            fake_cuda.wait()

    monkeypatch.setattr(FixedTarget, "_read_buffers", fails_captured)
    drafter = RandomDrafter()
    drafter.generation_config.capture = True

    pair = both(in_double(make_target()), drafter)

    pair.assert_equal(is_kept=False)
    assert any("ran without: CUDA error: operation not permitted" in note for note in pair.stats.notes)
    assert torch.cuda.default_generators[0].state == "before"  # else the next draw would fail


@pytest.mark.parametrize("num_results", [0, graph.NUM_WARM_UPS], ids=["of a warm-up", "of the replay"])
def test_without_memory_to_prove_a_graph_the_work_runs_as_it_is(num_results: int, fake_cuda: type[FakeGraph]) -> None:
    total, found = torch.zeros(1), []

    def results() -> list[torch.Tensor]:
        if len(found) == num_results:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        found.append(total)
        return [total]

    proof = Proof("a count", lambda: [total], results)
    work, other = RepeatedWork(CPU), RepeatedWork(CPU)

    for _ in range(3):
        work.run(lambda: total.add_(1), proof)
        other.run(lambda: None)

    assert total.item() == 3
    assert (work.failure, work.is_captured) == ("CUDA out of memory", False)
    assert (other.failure, other.is_captured) == (None, True)


def test_work_that_asks_the_host_is_not_captured_and_the_note_says_where(fake_cuda: type[FakeGraph]) -> None:
    work, runs = RepeatedWork(CPU), []

    def asks() -> None:
        runs.append(1)
        fake_cuda.wait()

    fake_cuda.sync_debug_mode = 2  # of the caller
    with pytest.raises(RuntimeError, match="synchronizing"):
        work.run(asks)

    work, fake_cuda.sync_debug_mode = RepeatedWork(CPU), 0
    for _ in range(2):
        work.run(asks)

    assert "capture begins" not in fake_cuda.log
    assert fake_cuda.sync_debug_mode == 0
    assert work.failure is not None
    assert work.failure.startswith("it asks the host at capture/test_graph.py:")
    assert len(runs) == 2 + graph.NUM_WARM_UPS + 2  # what raises to the caller is tried without a graph, too


def test_what_the_first_run_alone_asks_is_no_obstacle(fake_cuda: type[FakeGraph]) -> None:
    work, kept = RepeatedWork(CPU), []

    def asks_once() -> None:
        if not kept:
            fake_cuda.wait()
            kept.append(1)

    work.run(asks_once)

    assert (work.failure, work.is_captured) == (None, True)


def test_what_other_threads_ask_meanwhile_neither_fails_nor_counts(fake_cuda: type[FakeGraph]) -> None:
    work, failures = RepeatedWork(CPU), []

    def other() -> None:
        try:
            fake_cuda.wait()
        except RuntimeError as error:
            failures.append(error)

    def waits_beside() -> None:
        if fake_cuda.capturing is None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        work.run(waits_beside)

    assert (work.failure, failures, shown) == (None, [], [])
    assert work.is_captured


def test_a_capture_that_fails_names_its_cause_and_spoils_no_other(fake_cuda: type[FakeGraph]) -> None:
    pool = MemoryPool()
    first, faulty, later = (RepeatedWork(CPU, pool=pool) for _ in range(3))

    def fails_captured() -> None:
        if fake_cuda.capturing is not None:
            fake_cuda.wait()

    first.run(lambda: None)
    faulty.run(fails_captured)
    later.run(lambda: None)

    assert faulty.failure == "CUDA error: operation not permitted when stream is capturing"
    assert (first.failure, later.failure) == (None, None)
    assert fake_cuda.num_pools == 2
    assert fake_cuda.recording == set()  # else the allocator would free nothing any more


def test_a_pool_whose_graphs_are_gone_is_not_opened_again(fake_cuda: type[FakeGraph]) -> None:
    pool = MemoryPool()
    held = [RepeatedWork(CPU, pool=pool) for _ in range(2)]
    for work in held:
        work.run(lambda: None)
    before = fake_cuda.num_pools

    held.pop()
    work = RepeatedWork(CPU, pool=pool)
    work.run(lambda: None)
    shared = fake_cuda.num_pools
    held, work = [], RepeatedWork(CPU, pool=pool)
    work.run(lambda: None)

    assert (before, shared, fake_cuda.num_pools) == (1, 1, 2)
    assert work.failure is None


@pytest.mark.parametrize("fails", [False, True])
def test_workspaces_of_products_lie_in_the_pool_of_their_graph(fake_cuda: type[FakeGraph], fails: bool) -> None:
    RepeatedWork(CPU).run(lambda: fake_cuda.wait() if fails and fake_cuda.capturing is not None else None)

    assert fake_cuda.log == ["workspaces cleared", "capture begins", "capture ends", "workspaces cleared"]


def test_all_captures_share_a_stream(fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    streams = []

    @contextmanager
    def noted(_graph: FakeGraph, stream: object, **_: object) -> Iterator[None]:
        streams.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "graph", noted)
    monkeypatch.setattr(FakeGraph, "replay", lambda _graph: None)

    for _ in range(3):
        RepeatedWork(CPU).run(lambda: None)

    assert len(streams) == 3
    assert len(set(map(id, streams))) == 1  # otherwise their pool shares no memory


def test_a_replay_is_timed_by_the_device(fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [0.0]
    monkeypatch.setattr(FakeEvent, "record", lambda event, _stream: setattr(event, "moment", moments[-1]))
    monkeypatch.setattr(FakeGraph, "replay", lambda _graph: moments.append(moments[-1] + 0.5))
    work = RepeatedWork(CPU)
    work.run(lambda: None)

    assert work.replay_seconds() == 0.5
    assert len(moments) == 1 + 1 + graph.NUM_TIMED


def test_a_read_is_priced_by_its_replays_when_it_is_captured(
    fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    prices: list[list[float | None]] = []
    learn = Tuner.learn

    def learned(self: Tuner, *args: Any) -> None:
        prices[-1].append(args[-1])
        learn(self, *args)

    monkeypatch.setattr(Tuner, "learn", learned)
    monkeypatch.setattr(RepeatedWork, "replay_seconds", lambda _work: 0.25)
    target, drafter = in_double(make_target()), RandomDrafter(num_nodes=12, proposals=0.5, tune=False)
    drafter.generation_config.capture = True

    for _ in range(2):
        prices.append([])
        both(target, drafter).assert_equal(is_kept=False)

    first, second = prices
    assert first.count(0.25) == 2  # one node, and a tree
    assert set(first) == {0.25, None}
    assert set(second) == {None}


def test_pieces_that_follow_each_other_often_become_one_graph(
    fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "OFTEN", 3)
    launched: list[FakeGraph] = []
    replay = fake_cuda.replay

    def noted(self: FakeGraph) -> None:
        launched.append(self)
        replay(self)

    monkeypatch.setattr(fake_cuda, "replay", noted)
    pool, total = MemoryPool(), torch.ones(1)
    double, add = (RepeatedWork(CPU, (total,), pool) for _ in range(2))
    nums_launched = []

    for _ in range(6):
        launched.clear()
        with pool.together():
            double.run(lambda: total.mul_(2))
            add.run(lambda: total.add_(1))
        nums_launched.append(len(launched))

    assert total.item() == 127  # 2 * 63 + 1: once each time, in this order
    assert nums_launched[:3] == [2, 2, 2]
    assert nums_launched[4:] == [1, 1]
    assert len(pool.joined) == 1


def test_what_is_not_captured_is_done_after_what_waits(fake_cuda: type[FakeGraph]) -> None:
    pool, total = MemoryPool(), torch.ones(1)
    double, asking = (RepeatedWork(CPU, (total,), pool) for _ in range(2))

    def asks() -> None:
        fake_cuda.wait()
        total.add_(1)

    for _ in range(4):
        with pool.together():
            double.run(lambda: total.mul_(2))
            asking.run(asks)

    assert total.item() == 31
    assert asking.failure is not None
    assert pool.joined == []


@pytest.mark.parametrize("fault", ["a capture", "a proof"])
def test_pieces_that_cannot_be_joined_stay_graphs_of_their_own(
    fault: str, fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "OFTEN", 1)
    pool, total = MemoryPool(), torch.ones(1)
    proof = Proof("a count", lambda: [total], lambda: [total])
    double, add = (RepeatedWork(CPU, pool=pool) for _ in range(2))
    is_joining = False

    def added() -> None:
        if is_joining and fake_cuda.capturing is not None:
            if fault == "a capture":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            total.add_(100)  # what the graph of this piece does not
        total.add_(1)

    for number in range(4):
        is_joining = number > 0
        with pool.together():
            double.run(lambda: total.mul_(2), proof)
            add.run(added, proof)

    (joined,) = pool.joined
    assert total.item() == 31
    assert joined.failure is not None
    assert not joined.is_captured
    assert (double.is_captured, add.is_captured, pool.trust.doubt) == (True, True, None)


def test_the_graph_of_pieces_goes_with_each_of_them(
    fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "OFTEN", 1)
    pool = MemoryPool()
    first, second, third = (RepeatedWork(CPU, pool=pool) for _ in range(3))

    def repeat(*pieces: RepeatedWork) -> None:
        for _ in range(2):
            with pool.together():
                for piece in pieces:
                    piece.run(lambda: None)

    repeat(first, second)
    assert len(pool.joined) == 1
    del first
    repeat(second, third)
    gc.collect()

    assert len(pool.joined) == len(pool._joined) == 1
