"""A cell is measured turn by turn, with what is at hand."""

from pathlib import Path

import pytest
import torch

from benchmarks.on_gpu import runs
from benchmarks.on_gpu.cells import FALCON5, ORACLES, PLAIN, Cell, Way
from benchmarks.on_gpu.pairs import Pair
from tests.benchmarks.on_gpu.tiny_pair import models
from tests.tiny import make_prompt

__all__ = ["models"]
CPU = torch.device("cpu")


def test_a_way_that_fails_is_left_out_and_the_others_are_measured(models: Path, tmp_path: Path) -> None:
    pair = Pair(models, None, "small", torch.float32, CPU)
    records = runs.Records(tmp_path / "gpu.jsonl", {})
    cell = Cell("both", "small", (PLAIN, Way(FALCON5, captures=True)), num_turns=2)

    run = runs.CellRun(cell, pair, [make_prompt(9)], records, 1e9, 5)
    run.run(runs.Deadline(None))

    assert list(run.failures) == ["falcon5, captured"]
    turns = [(row["turn"], row["way"]) for row in records.entries if "turn" in row]
    assert turns == [(0, "plain, captured"), (1, "plain, captured")]
    assert runs.failures_of(cell, records.entries) == run.failures


@pytest.mark.parametrize(("decoding", "rows"), [("greedy", 1), ("temperature-1", 3)])
def test_an_oracle_writes_as_many_tokens_a_step_as_it_should(
    models: Path, tmp_path: Path, decoding: str, rows: int
) -> None:
    pair = Pair(models, None, "small", torch.float32, CPU)
    records = runs.Records(tmp_path / "gpu.jsonl", {})
    ways = (PLAIN, *(Way(who, captures=True) for who in ORACLES))
    cell = Cell("oracle", "small", ways, decoding, rows, num_turns=2, is_endless=True)
    prompts = [make_prompt(length, seed=length) for length in (9, 7, 12)]

    runs.CellRun(cell, pair, prompts, records, 1e9, 49).run(runs.Deadline(None))

    steps = {(row["way"], row["turn"]): row["num_steps"] for row in records.entries}
    expected = {PLAIN: 48, **{way: 48 // ORACLES[way.who] for way in ways[1:]}}  # the prefill writes the first token
    assert steps == {(way.name, turn): num for way, num in expected.items() for turn in range(2)}
    assert all(row["verdicts"]["identical"] == rows for row in records.entries)
