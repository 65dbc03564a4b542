"""Time counts for the innermost part, and what no part claims is bookkeeping."""

import time

import pytest
import torch

from benchmarks import bookkeeping as script
from benchmarks.no_loss import random_twin
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec.evaluation.decoding import decoding_options
from transformers_falcon_spec.generation.target import Target


def test_time_counts_for_the_innermost_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = script.Clock()

    def spend(seconds: float) -> None:
        now[0] += seconds

    inner = clock.timed("inner", spend)

    def work() -> None:
        spend(1.0)
        inner(4.0)
        inner(2.0)
        spend(0.5)

    clock.timed("outer", work)()

    assert clock.seconds == {"outer": 1.5, "inner": 6.0}


def test_parts_and_bookkeeping_are_the_whole_and_the_functions_are_themselves_again() -> None:
    target = make_target().double()
    drafter = make_drafter(target, block_size=2)
    read = Target.read

    _first, run = (
        script._run(target, make_prompt(5), 12, decoding_options("greedy"), drafter) for _ in range(2)
    )  # the first probes the target

    assert Target.read is read
    assert run["total"] == pytest.approx(sum(run[part] for part in (*script.SHARES, "bookkeeping")))
    assert min(run["target"], run["drafter"], run["bookkeeping"]) > 0
    assert run["lists"] == 0  # of a static tree none are made
    found = script._summary([run, run])
    assert sum(found[part]["share"] for part in (*script.SHARES, "bookkeeping")) == pytest.approx(1)


def test_a_random_twin_has_the_shape_and_nothing_else() -> None:
    drafter = make_drafter(make_target(), block_size=2)
    state = torch.get_rng_state()

    twin = random_twin(drafter)

    assert torch.get_rng_state().equal(state)
    for (name, weight), other in zip(drafter.named_parameters(), twin.parameters(), strict=True):
        assert weight.shape == other.shape
        assert "norm" in name or "bias" in name or not weight.equal(other)
