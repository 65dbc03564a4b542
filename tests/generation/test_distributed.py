"""A target that is split over processes: all of them decide alike whatever drafts, and processes with texts of their own do not meet."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from tests import runs
from tests.clock import give
from tests.doubles import InformedDrafter
from tests.drafters.eagle.kinds import make_eagle
from tests.drafters.easyspec.test_several_processes import ThreadProcesses
from tests.generation import split
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import SpeculationConfig
from transformers_falcon_spec.generation import loop

MOST_SECONDS = 500
DRAFTERS = {
    "falcon": lambda target: make_drafter(target, block_size=2),
    "eagle": lambda target: make_eagle(target, "eagle-1"),
}


@pytest.mark.parametrize("mode", split.MODES)
@pytest.mark.parametrize("kind", ["falcon", pytest.param("eagle", marks=pytest.mark.families)])
def test_ranks_with_clocks_of_their_own_take_the_same_steps(
    kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, values, barrier = make_target().double(), [None, None], Barrier(2, timeout=60)
    options = {"max_new_tokens": 40, **split.MODES[mode]}
    plain = runs.plain(target, **options).sequences
    drafters = [DRAFTERS[kind](target) for _ in range(2)]
    for drafter in drafters:
        drafter.generation_config = SpeculationConfig(dynamic_tree=True)
    pairs = [(deepcopy(target), InformedDrafter(drafter, plain)) for drafter in drafters]
    ranks = {id(own): ThreadProcesses(number, values, barrier) for number, (own, _) in enumerate(pairs)}
    monkeypatch.setattr(loop, "processes_of", lambda _drafter, own: ranks[id(own)])
    give(monkeypatch, split.WildClock())
    torch.manual_seed(0)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda pair: runs.seedless(*pair, **options), pairs))

    for out in found:
        assert out.sequences.tolist() == plain.tolist()
        assert out.speculation.acceptance_length > 1.1
        assert out.speculation.notes == [
            "2 processes write this text together: the first one decides for all of them."
        ]
    assert found[0].speculation.num_passes == found[1].speculation.num_passes
    assert len(found[0].speculation.tuning["steps_by_nodes"]) > 1  # the first one's tuner chose
    assert found[1].speculation.tuning == {}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes noted under `torchrun`."""
    folder = tmp_path_factory.mktemp("split")
    split.make_divisible().save_pretrained(folder / "target")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "-m", "tests.generation.split", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2)]


SPLIT = [f"{kind}, {mode}" for kind in split.KINDS for mode in split.MODES]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SPLIT, "falcon, grown", "eagle, rows", "falcon, by hand"])
def test_a_split_target_writes_its_own_text_on_every_rank(processes: list[dict[str, Any]], name: str) -> None:
    first, second = (found[name] for found in processes)

    for found in (first, second):
        assert found["num_ranks"] == 2
        assert found["text"] == found["plain"]
        assert found["is_state_equal"]
        assert found["accepted"] > 8 or name.startswith("lookahead")  # that one does not know the text
    assert first["text"] == second["text"]
    assert (first["passes"], first["accepted"]) == (second["passes"], second["accepted"])
    assert len(first["tuning"]["steps_by_nodes"]) > 1
    assert second["tuning"] == {}


@pytest.mark.slow
def test_processes_with_texts_of_their_own_do_not_wait_for_each_other(processes: list[dict[str, Any]]) -> None:
    found = [each["alone"] for each in processes]

    assert len(found[0]["text"][0]) != len(found[1]["text"][0])
    for each in found:
        assert each["text"] == each["plain"]
        assert (each["num_ranks"], each["notes"]) == (1, [])
        assert each["accepted"] > 4
        assert each["tuning"]


@pytest.mark.slow
def test_ranks_with_other_drafters_are_refused_on_all_of_them(processes: list[dict[str, Any]]) -> None:
    for each in processes:
        assert each["refused"].startswith(
            "DistributedError: All processes must have the same drafter weights, but process 0 has "
        )
