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
from benchmarks.on_gpu.phases import PHASES, phase_of
from tests import runs
from tests.fake_cuda import FakeGraph, fake_cuda
from tests.pretend.device import device, pretended, to_device
from tests.pretend.guard import why_no_guard
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.generation.static.graph import RepeatedWork

__all__ = ["fake_cuda"]
pytestmark = [pytest.mark.families, pytest.mark.pretend]
EMBEDDED = Path(__file__).parents[2] / "models" / "falcon-reference"
PARTS = (
    *("block_size", "block_position_embedding", "newest_row", "num_recurrent_layers", "recurrence", "shortcut"),
    *("sliding_window", "transition_rank", "transition_size", "transition_tokens"),
)  # of its config, which decide what it computes
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
SHORT, LONG = 12, 20  # new tokens of two calls, the difference of which is that of their steps


@pytest.fixture
def counts(fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The pretended device; counts operations in graphs by phase of a step, the graphs, and the waits of the host."""
    reason = why_no_guard()
    if reason is not None:
        pytest.skip(reason)

    found: Counter[str] = Counter()
    phase = ""
    run, replay, wait = RepeatedWork.run, fake_cuda.replay, fake_cuda.wait

    def noted(self: RepeatedWork, work: Any) -> None:
        nonlocal phase
        phase = phase_of(work)
        run(self, work)

    def replayed(self: FakeGraph) -> None:
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


def _a_step(counts: Counter[str], target: Any, drafter: Any, prompt: Any, **options: Any) -> dict[str, float]:
    """What a step takes on average, once all graphs are made."""
    found = []
    for num_new in (LONG, SHORT, LONG):  # the first one captures
        counts.clear()
        device.launches.clear()
        stats = runs.drafted(target, drafter, prompt, max_new_tokens=num_new, **options).speculation
        found.append({**counts, "launches": device.launches.total(), "steps": stats.num_steps})

    _, few, many = found
    num_steps = many.pop("steps") - few["steps"]
    return {name: (num - few[name]) / num_steps for name, num in many.items()}


@pytest.mark.parametrize(
    ("make", "options", "limits"),
    [
        (_plain, {}, {"operations": 1379, "graphs": 2, "launches": 8, "waits": 2}),
        (_plain, SAMPLED, {"operations": 1396, "graphs": 2, "launches": 11, "waits": 2}),
        (_embedded, {}, {"operations": 2234, "graphs": 5.3, "launches": 14, "waits": 1}),
        (_embedded, SAMPLED, {"operations": 2482, "graphs": 5.4, "launches": 46, "waits": 1}),
    ],
    ids=["plain-greedy", "plain-sampled", "embedded-greedy", "embedded-sampled"],
)
def test_a_captured_step_takes_no_more_than_it_did(
    make: Callable[[Any], Any], options: dict[str, Any], limits: dict[str, float], counts: Counter[str]
) -> None:
    target = make_target(num_hidden_layers=32).double()
    drafter = make(target)
    target, prompt = to_device(target), to_device(make_prompt())

    found = _a_step(counts, target, drafter, prompt, **options)

    assert found.keys() <= {*limits, *PHASES}
    found["operations"] = sum(found.get(phase, 0) for phase in PHASES)
    assert {name: num for name, num in found.items() if num > limits.get(name, num)} == {}, found
