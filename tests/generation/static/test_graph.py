"""Repeated work: it runs as it is on a CPU, and where it can be captured it is warmed up without a trace."""

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
from transformers_falcon_spec.generation.static import graph
from transformers_falcon_spec.generation.static.graph import RepeatedWork
from transformers_falcon_spec.generation.tuning.tuner import Tuner

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
    total, is_open = torch.zeros(1), torch.ones(1, dtype=torch.bool)
    seen: list[bool] = []
    work = RepeatedWork(CPU, (total,), is_open)

    def count() -> None:
        seen.append(bool(is_open))
        total.add_(is_open)

    for _ in range(4):
        work.run(count)

    assert total.item() == 4
    assert seen == [False] * graph.NUM_WARM_UPS + [True]  # then Python is out of it
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
    drafter.generation_config.step = "static"

    pair = both(in_double(make_target()), drafter)

    pair.assert_equal(is_kept=False)
    assert "Some of the work could not be captured and ran without: CUDA out of memory. Tried to allocate 2 GiB." in (
        pair.stats.notes
    )


def test_work_that_cannot_be_captured_runs_as_it_is(
    fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def fails(_graph: object, **_: object) -> Iterator[None]:
        torch.cuda.default_generators[0].state = "capturing"
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        yield  # pragma: no cover  a capture runs nothing

    monkeypatch.setattr(torch.cuda, "graph", fails)
    drafter = RandomDrafter()
    drafter.generation_config.step = "static"

    pair = both(in_double(make_target()), drafter)

    pair.assert_equal(is_kept=False)
    assert any("ran without: CUDA error: operation not permitted" in note for note in pair.stats.notes)
    assert torch.cuda.default_generators[0].state == "before"  # else the next draw would fail


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
    drafter.generation_config.step = "static"

    for _ in range(2):
        prices.append([])
        both(target, drafter).assert_equal(is_kept=False)

    first, second = prices
    assert first.count(0.25) == 2  # one node, and a tree
    assert set(first) == {0.25, None}
    assert set(second) == {None}
