"""A cell is measured turn by turn, with what is at hand."""

from pathlib import Path

import pytest
import torch

from benchmarks.on_gpu import runs
from benchmarks.on_gpu.cells import ORACLES, PLAIN, Cell, Way
from benchmarks.on_gpu.pairs import Pair
from tests.benchmarks.on_gpu.tiny_pair import models
from tests.tiny import make_prompt
from transformers_falcon_spec import DiffusionDrafter
from transformers_falcon_spec.commands.loading import load_target
from transformers_falcon_spec.drafters.autoregressive import make_draft_model

__all__ = ["models"]
CPU = torch.device("cpu")


def test_a_way_that_fails_is_left_out_and_the_others_are_measured(models: Path, tmp_path: Path) -> None:
    pair = Pair(models, None, "small", None, torch.float32, CPU)
    records = runs.Records(tmp_path / "gpu.jsonl", {})
    cell = Cell("both", "small", (PLAIN, Way("eagle1", captures=True)), num_turns=2)

    run = runs.CellRun(cell, pair, [make_prompt(9)], records, 1e9, 5)
    run.run(runs.Deadline(None))

    assert list(run.failures) == ["eagle1, captured"]
    turns = [(row["turn"], row["way"]) for row in records.entries if "turn" in row]
    assert turns == [(0, "plain, captured"), (1, "plain, captured")]
    assert runs.failures_of(cell, records.entries) == run.failures


def test_a_prompt_of_a_given_length_is_made_of_the_prompts(models: Path, tmp_path: Path) -> None:
    pair = Pair(models, None, "small", None, torch.float32, CPU)
    cell = Cell("long", "small", (PLAIN,), lengths=(4, 11), num_turns=4)
    run = runs.CellRun(
        cell, pair, [torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])], runs.Records(tmp_path / "a.jsonl", {}), 1.0, 4
    )

    ids = [run.batch(turn)[0].tolist() for turn in range(4)]

    assert ids == [
        [[1, 2, 3, 4]],
        [[4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4]],
        [[1, 2, 3, 4]],
        [[4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4]],
    ]


def test_drafters_that_are_whole_models_draft_in_fixed_shapes(models: Path, tmp_path: Path) -> None:
    target, _ = load_target(str(models / "reference-target"), "float32", "cpu")
    make_draft_model(target, num_hidden_layers=3).save_pretrained(tmp_path / "trained" / "draft-model")
    DiffusionDrafter.from_target(target, block_size=3).save_pretrained(models / "diffuspec-prefix")
    pair = Pair(models, tmp_path / "trained", "small", None, torch.float32, CPU)
    records = runs.Records(tmp_path / "gpu.jsonl", {})
    ways = tuple(Way(who, captures=True) for who in ("language model", "EasySpec", "DiffuSpec"))

    runs.CellRun(Cell("whole models", "small", ways, num_turns=1), pair, [make_prompt(9)], records, 1e9, 5).run(
        runs.Deadline(None)
    )

    turns = [row for row in records.entries if "turn" in row]
    assert {row["way"] for row in turns} == {way.name for way in ways}
    assert all(row["is_captured"] for row in turns)
    noted = {row["way"].split(",")[0] for row in turns if row["notes"]}
    assert noted == {"DiffuSpec"}  # whose drafts are not captured


@pytest.mark.parametrize(("decoding", "rows"), [("greedy", 1), ("temperature-1", 3)])
def test_an_oracle_writes_as_many_tokens_a_step_as_it_should(
    models: Path, tmp_path: Path, decoding: str, rows: int
) -> None:
    pair = Pair(models, None, "small", None, torch.float32, CPU)
    records = runs.Records(tmp_path / "gpu.jsonl", {})
    ways = (PLAIN, *(Way(who, captures=True) for who in ORACLES))
    cell = Cell("oracle", "small", ways, decoding, rows, num_turns=2, is_endless=True)
    prompts = [make_prompt(length, seed=length) for length in (9, 7, 12)]

    runs.CellRun(cell, pair, prompts, records, 1e9, 49).run(runs.Deadline(None))

    steps = {(row["way"], row["turn"]): row["num_steps"] for row in records.entries}
    expected = {PLAIN: 48, **{way: 48 // ORACLES[way.who] for way in ways[1:]}}  # the prefill writes the first token
    assert steps == {(way.name, turn): num for way, num in expected.items() for turn in range(2)}
    assert all(row["verdicts"]["identical"] == rows for row in records.entries)
