"""What a captured step of 32 layers costs besides its matrix products: operations in graphs, orders of the host, and waits for the device.

A figure that falls is to be written down here; one that grows is a step that got slower on every GPU.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.on_gpu.pairs import captured_plain
from benchmarks.on_gpu.phases import phase_of
from tests import runs
from tests.fake_cuda import FakeGraph, fake_cuda
from tests.pretend.device import device, pretended, to_device
from tests.pretend.guard import why_no_guard
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.generation.capture.graph import RepeatedWork
from transformers_falcon_spec.generation.loop import SpeculativeDecoding

__all__ = ["fake_cuda"]
pytestmark = [pytest.mark.families, pytest.mark.pretend]
EMBEDDED = Path(__file__).parents[2] / "models" / "falcon-reference"
PARTS = (
    *("block_size", "block_position_embedding", "newest_row", "num_recurrent_layers", "recurrence", "shortcut"),
    *("sliding_window", "transition_rank", "transition_size", "transition_tokens"),
)  # of its config, which decide what it computes
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


@pytest.fixture
def counts(fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The pretended device; counts operations in graphs by phase of a step, the graphs, and the waits of the host."""
    reason = why_no_guard()
    if reason is not None:
        pytest.skip(reason)

    found: Counter[str] = Counter()
    phase = ""
    run, replay, wait = RepeatedWork.run, fake_cuda.replay, fake_cuda.wait

    def noted(self: RepeatedWork, work: Any, *proof: Any) -> None:
        nonlocal phase
        phase = phase_of(work)
        run(self, work, *proof)

    def replayed(self: FakeGraph) -> None:
        found["operations"] += self.num_kernels
        found[phase] += self.num_kernels
        found["graphs"] += 1
        replay(self)

    def waited() -> None:
        found["waits"] += 1
        wait()

    monkeypatch.setattr(RepeatedWork, "run", noted)
    monkeypatch.setattr(fake_cuda, "replay", replayed)
    monkeypatch.setattr(fake_cuda, "wait", waited)
    with pretended(fake_cuda, monkeypatch):
        yield found


def _plain(target: Any) -> Any:
    return captured_plain(target, captures=True, compiles=False)


def _embedded(target: Any) -> Any:
    """A Falcon drafter like the embedded one but for its widths, which change nothing here."""
    saved = json.loads((EMBEDDED / "config.json").read_text("utf-8"))
    drafter = make_drafter(target, **{name: saved[name] for name in PARTS})
    drafter.generation_config = SpeculationConfig.from_pretrained(EMBEDDED)
    drafter.generation_config.capture, drafter.generation_config.tune = True, False
    return to_device(drafter)


def _dearest_step(
    counts: Counter[str], target: Any, drafter: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[str, int]:
    """The most that one step takes of each, once all graphs are made; the prefill and the first step are left out."""
    steps: list[Counter[str]] = []
    record = SpeculativeDecoding.record

    def recorded(*args: Any, **kwargs: Any) -> None:
        record(*args, **kwargs)
        steps.append(Counter({**counts, "launches": device.launches.total()}))
        counts.clear()
        device.launches.clear()

    monkeypatch.setattr(SpeculativeDecoding, "record", recorded)
    prompt = to_device(make_prompt())
    for _ in range(3):  # the first call captures, and the second what the first came to last
        steps.clear()
        runs.drafted(target, drafter, prompt, **options)

    names = {name for step in steps[1:] for name in step}
    return {name: max(step[name] for step in steps[1:]) for name in names}


@pytest.mark.parametrize(
    ("make", "options", "limits"),
    [
        (_plain, {}, {"operations": 985, "graphs": 1, "launches": 2, "waits": 1}),
        (_plain, SAMPLED, {"operations": 1007, "graphs": 1, "launches": 3, "waits": 1}),
        (_embedded, {}, {"operations": 1507, "graphs": 2, "launches": 2, "waits": 1}),
        (_embedded, SAMPLED, {"operations": 1533, "graphs": 2, "launches": 10, "waits": 1}),
    ],
    ids=["plain-greedy", "plain-sampled", "embedded-greedy", "embedded-sampled"],
)
def test_a_captured_step_takes_no_more_than_it_did(
    make: Callable[[Any], Any],
    options: dict[str, Any],
    limits: dict[str, int],
    counts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = make_target(num_hidden_layers=32).bfloat16()
    drafter = make(target)

    found = _dearest_step(counts, to_device(target), drafter, options, monkeypatch)

    assert all(found[name] <= limit for name, limit in limits.items()), found
