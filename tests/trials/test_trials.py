"""Trials in tests: many calls at random without a difference, and trials that are known to show one."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.thresholds import INSTALLED_NEWER
from tests.trials.__main__ import main
from tests.trials.call import Call
from tests.trials.changes import OFFLOADS
from tests.trials.compare import are_close
from tests.trials.draw import FIRST_AT_LENGTHS, FIRST_CHANGED, FIRST_NEWER, draw
from tests.trials.faults import FAULTS
from tests.trials.script import script, smallest
from tests.trials.trial import Outcome, trial
from transformers_falcon_spec import GenerationStats
from transformers_falcon_spec.generation import packed_linear

ROOT = Path(__file__).parents[2]
NUM_QUICK, NUM_ALL, CHUNK = 100, 2000, 20
NUM_OTHERS, NUM_NEWER = 20, 10  # of kinds whose cases other tests go through one by one
SLOW_CHUNK = 100  # many enough that by chance alone no half of them keeps nothing
WELL_ABOVE_ONE = 1.3


CHUNKS = [range(start, start + CHUNK) for start in range(0, NUM_QUICK, CHUNK)]
SLOW_CHUNKS = [range(start, start + SLOW_CHUNK) for start in range(NUM_QUICK, NUM_ALL, SLOW_CHUNK)]


@pytest.mark.parametrize(
    "seeds",
    [*CHUNKS, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in SLOW_CHUNKS)],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
def test_calls_at_random_are_those_of_plain_decoding(seeds: range) -> None:
    outcomes = {seed: trial(draw(seed)) for seed in seeds}

    different = {seed: outcome for seed, outcome in outcomes.items() if outcome.kind == "different"}
    assert not different, "\n".join(f"seed {seed}: {found}\n{script(draw(seed))}" for seed, found in different.items())
    _assert_much_was_tried(list(outcomes.values()))
    _assert_packed(outcomes)


@pytest.mark.parametrize(
    "seeds", [range(start, start + CHUNK) for start in range(FIRST_CHANGED, FIRST_CHANGED + NUM_OTHERS, CHUNK)]
)
def test_calls_of_changed_targets_are_those_of_plain_decoding(seeds: range) -> None:
    """Hooks, forwards, attention functions and quantised layers of the caller's."""
    outcomes = {seed: trial(draw(seed)) for seed in seeds}

    assert all(draw(seed).change is not None for seed in seeds)
    different = {seed: outcome for seed, outcome in outcomes.items() if outcome.kind == "different"}
    assert not different, "\n".join(f"seed {seed}: {found}\n{script(draw(seed))}" for seed, found in different.items())
    assert Counter(each.kind for each in outcomes.values())["same"] > 0.6 * len(outcomes)
    assert any(each.stats.num_accepted > 0 for each in outcomes.values())  # most are read token by token


@pytest.mark.parametrize(
    "seeds", [range(start, start + CHUNK) for start in range(FIRST_AT_LENGTHS, FIRST_AT_LENGTHS + NUM_OTHERS, CHUNK)]
)
def test_calls_near_lengths_that_configs_name_are_those_of_plain_decoding(seeds: range) -> None:
    """Prompts on both sides of small windows, chunks, contexts and the like; layers are offloaded in some."""
    outcomes = {seed: trial(draw(seed)) for seed in seeds}

    assert all(draw(seed).threshold is not None for seed in seeds)
    assert {draw(seed).change for seed in seeds} == {None, *OFFLOADS}
    different = {seed: outcome for seed, outcome in outcomes.items() if outcome.kind == "different"}
    assert not different, "\n".join(f"seed {seed}: {found}\n{script(draw(seed))}" for seed, found in different.items())
    assert Counter(each.kind for each in outcomes.values())["same"] > 0.6 * len(outcomes)
    assert sum(each.stats.num_accepted > 0 for each in outcomes.values()) > 0.2 * len(
        outcomes
    )  # many lengths end drafts


@pytest.mark.skipif(not INSTALLED_NEWER, reason="this Transformers has no families that the oldest has not")
def test_calls_of_newer_targets_are_those_of_plain_decoding() -> None:
    seeds = range(FIRST_NEWER, FIRST_NEWER + NUM_NEWER)
    outcomes = {seed: trial(draw(seed)) for seed in seeds}

    assert {draw(seed).family for seed in seeds} == set(INSTALLED_NEWER)
    different = {seed: outcome for seed, outcome in outcomes.items() if outcome.kind == "different"}
    assert not different, "\n".join(f"seed {seed}: {found}\n{script(draw(seed))}" for seed, found in different.items())
    assert sum(each.stats.num_accepted > 0 for each in outcomes.values()) > 0.2 * len(outcomes)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_row_that_ended_and_that_others_outgrow_goes_on_as_in_plain_decoding(family: str) -> None:
    """Without an end-of-sequence token, rows at a stop string wait for the others and grow with them (seeds 1430, 1590 and 1927)."""
    calls = [
        Call(seed=seed, family=family, dtype="float64", hit_rate=0.9, lengths=(12, 3, 5), extras=("stop strings",))
        for seed in range(4)
    ]

    outcomes = [trial(call) for call in calls]

    assert [(outcome.kind, outcome.found) for outcome in outcomes] == [("same", [])] * len(calls)
    assert sum(outcome.stats.num_accepted for outcome in outcomes) > 0


def _assert_much_was_tried(outcomes: list[Outcome]) -> None:
    """Few calls are refused, and most drafts are worth something: trials that draft nothing find nothing."""
    kinds, stats = Counter(each.kind for each in outcomes), sum((each.stats for each in outcomes), GenerationStats())
    print(dict(kinds), f"acceptance length {stats.acceptance_length:.2f}")  # noqa: T201  seen with -s, or where this fails
    assert kinds["same"] > 0.7 * len(outcomes)
    stepping = [each for each in outcomes if each.stats.num_steps > 0]  # others end with the token of the prompt
    assert len(stepping) > 0.6 * len(outcomes)
    assert sum(each.stats.num_accepted > 0 for each in stepping) >= len(stepping) / 2
    assert stats.acceptance_length > WELL_ABOVE_ONE


def _assert_packed(outcomes: dict[int, Outcome]) -> None:
    """Calls that ask for packed weights read some, in the type for which every processor has kernels, if they draft."""
    calls = {seed: draw(seed) for seed in outcomes if outcomes[seed].kind in {"same", "tie"}}
    asking = [seed for seed, call in calls.items() if "pack_weights" in call.speculation and call.dtype == "float32"]
    drafting = [seed for seed in asking if outcomes[seed].stats.num_drafted]
    assert drafting
    if packed_linear._can_pack(torch.zeros(4, 4)):
        assert [seed for seed in drafting if not outcomes[seed].stats.packed_bytes] == []
    assert not any(outcomes[seed].stats.packed_bytes for seed in asking if not outcomes[seed].stats.num_steps)


def _call_with(fault: str) -> Call:
    """A call that shows every fault."""
    return Call(
        drafter="falcon",
        hit_rate=0.9,
        decoding={"max_new_tokens": 24, "do_sample": False},
        extras=("spy", "tilt") if fault == "argument" else ("spy",),
        outputs=("scores", "hidden_states"),
        streams=True,
        fault=fault,
    )


@cache
def _is_same_without_fault(is_tilted: bool) -> bool:
    call = _call_with("argument" if is_tilted else "mask")
    return trial(replace(call, fault=None)).kind == "same"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    call = _call_with(fault)
    assert _is_same_without_fault("tilt" in call.extras)

    outcome = trial(call)

    assert outcome.kind == "different"
    assert any(FAULTS[fault].sign in each for each in outcome.found)


@pytest.mark.parametrize("verifier", ["traversal", "recursive_rejection"])
def test_a_crash_on_both_sides_is_found_where_both_draft(verifier: str) -> None:
    sampling = {"max_new_tokens": 5, "do_sample": True}
    call = Call(drafter="falcon", hit_rate=0.0, speculation={"verifier": verifier}, decoding=sampling)
    assert trial(call).kind == "same"

    assert trial(replace(call, fault="crash")).kind == "different"


def test_rounding_explains_a_cut_at_the_limit_and_no_other() -> None:
    cut = -torch.inf
    one, at_limit = torch.tensor([4.0, 1.0, 1.0, cut, cut, 3.0]), torch.tensor([4.0, cut, cut, 1.0, 1.0, 3.0])
    far = torch.tensor([cut, 1.0, 1.0, 1.0, cut, 3.0])

    assert are_close(one, at_limit, "float64", num_cut=2)
    assert not are_close(one, at_limit, "float64")
    assert not are_close(one, far.masked_fill(torch.tensor([0, 0, 0, 0, 1, 1]).bool(), cut), "float64", num_cut=2)


def test_a_fault_that_no_draft_meets_does_no_harm() -> None:
    call = Call(drafter="random", hit_rate=0.0, decoding={"max_new_tokens": 1}, fault="mask")

    assert trial(call).kind == "same"


def test_the_script_of_a_failing_call_repeats_it(tmp_path: Path) -> None:
    path = tmp_path / "again.py"
    call = _call_with("mask")
    path.write_text(script(call), encoding="utf-8")

    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(
        [sys.executable, str(path)], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )

    assert done.stdout.startswith("different")
    assert FAULTS["mask"].sign in done.stdout
    assert str(trial(call)).strip() == done.stdout.strip()


def test_the_smallest_call_has_what_the_difference_needs_and_no_more() -> None:
    call = replace(_call_with("argument"), lengths=(5,), is_training=True, dtype="float64")

    assert smallest(call) == Call(extras=("tilt",), fault="argument")


def test_the_command_tries_seeds_once_and_sums_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    for seeds in ("0:1", "0:2"):
        monkeypatch.setattr(sys, "argv", ["trials", "--seeds", seeds, "--log", str(log)])
        assert main() == 0

    assert len(log.read_text(encoding="utf-8").splitlines()) == 2
    assert "2 trials: same 2" in capsys.readouterr().out


def test_the_same_seed_draws_the_same_call_and_prints_as_code() -> None:
    for seed in range(50):
        call = draw(seed)
        assert eval(repr(call), {"Call": Call}) == call == draw(seed)  # noqa: S307  the text is our own
