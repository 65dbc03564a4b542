"""Drafting on several processes: the drafts of one, the target's text on every process, and none that waits for ever."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.layer_groups import LayerByLayer
from tests.drafters.easyspec import spread
from tests.drafters.easyspec.kinds import GROUPS, make_drafter, make_model
from tests.drafters.easyspec.twin import IN_ORDER
from tests.tiny import make_prompt
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.distributed import Processes

pytestmark = pytest.mark.families

PROGRAM = "tests.drafters.easyspec.spread"
MOST_SECONDS = 300


def launched(folder: Path, num_processes: int) -> list[dict[str, Any]]:
    """What all processes noted under `torchrun`."""
    spread.make_divisible().save_pretrained(folder / "target")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    command = [sys.executable, *torchrun, "-m", PROGRAM, str(folder), "texts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"process{number}.json").read_text()) for number in range(num_processes)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(num, id=f"{num} processes", marks=pytest.mark.slow) for num in (2, 4)],
)
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launched(tmp_path_factory.mktemp("spread"), request.param)


class ThreadProcesses(Processes):
    """Threads of one process that meet at a barrier: what processes exchange, without them."""

    def __init__(self, number: int, values: list[Any], barrier: Barrier) -> None:
        self.num, self.process_rank, self._values, self._barrier = len(values), number, values, barrier

    def broadcast(self, value: Any) -> Any:
        return self._exchanged(value)[0]

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._exchanged(part))

    def _exchanged(self, value: Any) -> list[Any]:
        self._values[self.process_rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


def reports_of_threads(name: str, num_processes: int) -> list[dict[str, Any]]:
    """What each thread notes of the text of one of `spread.cases`."""
    trees, options = spread.cases()[name]
    values: list[Any] = [None] * num_processes
    barrier, targets = Barrier(num_processes, timeout=600), [spread.make_divisible() for _ in range(num_processes)]
    drafters = [spread.make(own, **trees) for own in targets]  # made one after the other, for they draw their weights

    def report(number: int) -> dict[str, Any]:
        drafters[number]._processes = ThreadProcesses(number, values, barrier)
        try:
            with torch.no_grad():
                return spread.noted(targets[number], drafters[number], **options)
        except Exception:
            barrier.abort()  # lest the others wait
            raise

    with ThreadPoolExecutor(num_processes) as threads:
        return list(threads.map(report, range(num_processes)))


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("name", ["greedy", "chain", "rows"])
def test_threads_that_share_the_layers_draft_what_one_process_drafts(name: str, num_processes: int) -> None:
    trees, options = spread.cases()[name]
    target = spread.make_divisible()
    drafter = spread.make(target, IN_ORDER, **trees)
    drafter.generation_config.capture = False  # as where layers are shared; a last draft of fixed shape is deeper
    alone = spread.noted(target, drafter, **options)

    found = reports_of_threads(name, num_processes)

    for each in found:
        assert [each[key] for key in ("text", "num_passes", "accepted")] == [
            alone[key] for key in ("text", "num_passes", "accepted")
        ]
    assert len({each["num_bytes"] for each in found}) == 1
    assert found[0]["num_gathers"] > 0


def test_threads_that_share_the_layers_write_one_text_where_drafts_are_drawn() -> None:
    first, second = reports_of_threads("drawn", 2)  # threads share a random stream, so that it may be any text

    assert first["text"] == second["text"]


@contextmanager
def groups_seen(patch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The layers of each group that is computed inside, and the bytes of what each of them gives."""
    seen, attend = [], LayerByLayer.attend

    def watched(self: LayerByLayer, number: int, states: Tensor, inputs: Any) -> Any:
        seen.append((len(self.groups[number]), states.nbytes))
        return attend(self, number, states, inputs)

    with patch.context() as inner:
        inner.setattr(LayerByLayer, "attend", watched)
        yield seen


def test_every_process_writes_the_text_that_the_first_one_would_write_alone(reports: list[dict[str, Any]]) -> None:
    target = spread.make_divisible()

    for name, (trees, options) in spread.cases().items():
        if "verifier" in trees or name == "sampled rows":  # not what a batch without a drafter draws
            expected = spread.write(target, spread.make(target, IN_ORDER, **trees), **options).sequences.tolist()
        else:
            expected = spread.write(target, **options).sequences.tolist()
        for report in reports:
            assert report[name]["text"] == expected, name
            if name in spread.SPLIT:
                assert report[f"{name}, split"]["text"] == expected, name


def test_drafts_are_those_of_one_process_and_every_exchange_is_counted(
    reports: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = spread.make_divisible()

    for name, (trees, options) in spread.cases().items():
        drafter = spread.make(target, IN_ORDER, **trees)
        with groups_seen(monkeypatch) as seen:
            alone = spread.noted(target, drafter, **options)
        shares = [-(-num_layers // len(reports)) * num_bytes for num_layers, num_bytes in seen]
        for report in reports:
            assert (report[name]["num_passes"], report[name]["accepted"]) == (
                alone["num_passes"],
                [list(pair) for pair in alone["accepted"]],
            ), name
            assert report[name]["num_gathers"] == len(seen) > 0
            assert report[name]["num_bytes"] == (len(reports) - 1) * sum(shares)
            assert "the first one decides for all of them" in report[name]["notes"][0]
    assert (
        sum(int(number) for number, _ in reports[0]["greedy"]["accepted"]) > 0
    )  # drafting went on from what was kept


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other weights", "DistributedError: All processes must have the same drafter weights, but process 0 has "),
        (
            "other options",
            "DistributedError: All processes must have the same `tree_depth`, but process 0 has 3 and process 1 4",
        ),
        ("other prompts", "DistributedError: All processes must have the same prompts, but process 0 has [[37, 24"),
    ],
)
def test_processes_that_do_not_fit_together_are_refused_on_all_of_them(
    reports: list[dict[str, Any]], name: str, message: str
) -> None:
    for report in reports:
        assert report[name].startswith(message)
        assert report["again"]["text"] == report["chain"]["text"]  # and the next call works


def test_more_processes_than_layers_draft_all_the_same(reports: list[dict[str, Any]]) -> None:
    assert [report["more processes than layers"] for report in reports] == ["nothing"] * len(
        reports
    )  # is said against it


def left_over(folder: Path, scenario: str) -> tuple[dict[str, Any], int]:
    """What the first of two processes says when it loses the other, and how that one ended; no `torchrun`, which would end both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", PROGRAM, str(folder), scenario]
    processes = [subprocess.Popen(command, env={**os.environ, **where, "RANK": str(number)}) for number in range(2)]
    try:
        ends = [process.wait(MOST_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert ends[0] == 0
    return json.loads((folder / "process0.json").read_text()), ends[1]


def test_a_process_that_is_killed_stops_the_others_with_a_clear_error(tmp_path: Path) -> None:
    found, end = left_over(tmp_path, "killed")

    assert end == -9
    assert found["said"].startswith(
        "DistributedError: All 2 processes must take part in the call until it ends, but process 0 waited in"
    )
    assert found["seconds"] < spread.LONG


@pytest.mark.slow
def test_nobody_waits_longer_than_the_timeout_for_a_process_that_stands_still(tmp_path: Path) -> None:
    found, _ = left_over(tmp_path, "still")

    assert found["said"].startswith(
        "DistributedError: All 2 processes must take part in the call until it ends, but process 0 waited in"
    )
    assert spread.SHORT <= found["seconds"] < 2 * spread.SHORT


def test_one_process_alone_is_refused_with_how_to_start_several() -> None:
    target = make_model("llama")
    drafter = make_drafter(target, backend="distributed")

    with pytest.raises(
        OptionError, match=r'"distributed"` needs processes .* does not run here. Start .* with `torchrun`'
    ):
        target.generate(make_prompt(), assistant_model=drafter, max_new_tokens=4)


def test_processes_wait_for_some_time() -> None:
    with pytest.raises(OptionError, match=r"`timeout_seconds` must be above 0, but it is 0\.0"):
        make_drafter(make_model("llama"), backend="distributed", layer_groups=GROUPS, timeout_seconds=0.0)


def test_synced_gpus_is_refused() -> None:
    target = make_model("llama")

    with pytest.raises(ValueError, match="`synced_gpus` is not supported with a drafter"):
        target.generate(make_prompt(), assistant_model=make_drafter(target), synced_gpus=True, max_new_tokens=4)
