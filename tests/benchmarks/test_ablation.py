"""The two ablations of Falcon drafters: what each point trains, which trees it drafts, and what the tables say was changed."""

import json
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import ablation
from transformers_falcon_spec import cli
from transformers_falcon_spec.commands import bench as bench_command
from transformers_falcon_spec.commands import train as train_command
from transformers_falcon_spec.commands.loading import load_tree
from transformers_falcon_spec.drafters.falcon.paper_tree import paper_tree
from transformers_falcon_spec.training.recipes import recipe_of


class Commands:
    """Stands for the processes: takes what the command line takes, writes what a run leaves behind, and keeps the options."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: list[Any] = []
        self.measured: list[Any] = []
        monkeypatch.setattr(
            train_command, "run", wraps(train_command.run)(lambda *options: self.trained.append(options))
        )
        monkeypatch.setattr(
            bench_command, "run", wraps(bench_command.run)(lambda *options: self.measured.append(options))
        )
        monkeypatch.setattr(ablation, "run_command", self)
        monkeypatch.setattr(ablation, "extract", lambda *_: None)

    def __call__(self, folder: Path, *command: str) -> None:
        assert cli.main(list(command)) == 0
        folder.mkdir(parents=True, exist_ok=True)
        if command[0] == "train":
            last = {"eval_accuracy": 0.5, **{f"eval_accuracy_at_{position}": 1 / position for position in range(1, 5)}}
            (folder / "training.json").write_text(json.dumps({"curve": [last]}), encoding="utf-8")
            save_file({"weight": torch.zeros(500, 1000)}, folder / "model.safetensors")
            return
        row = {"acceptance_length_pooled": 2.5, "acceptance_length_pooled_interval": [2.4, 2.6]}
        rows = [{"set": name, **row} for name in ablation.SETS]
        Path(self.measured[-1][0].output).write_text(json.dumps({"rows": rows}), encoding="utf-8")


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    files = [
        "--data",
        "a.jsonl",
        "--eval_data",
        "b.jsonl",
        "--runs",
        str(tmp_path / "runs"),
        "--results",
        str(tmp_path),
    ]
    monkeypatch.setattr("sys.argv", ["ablation.py", *files, "--workers", "1", "--steps", "7", *options])
    ablation.main()


def test_with_and_without_csgd_all_else_is_the_papers_recipe_drafted_as_chain_and_as_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Commands(monkeypatch)

    run(tmp_path, monkeypatch, "--only", "csgd")

    assert [args.use_glancing for _, args, _, _ in commands.trained] == [False, True]
    for command, args, _, given in commands.trained:
        assert (command.recipe, command.drafter_config, args.max_steps) == ("paper", [], 7)
        assert set(given) & {*recipe_of("paper", "falcon").training} <= {"use_glancing"}
    trees = [load_tree(command.draft_tree).to_json() for (command,) in commands.measured]
    chain = {"parents": [*range(-1, 8)], "ranks": [-1] + [0] * 8}
    assert trees == [chain, paper_tree().to_json()] * 2
    result = json.loads((tmp_path / "ablation_csgd.json").read_text(encoding="utf-8"))
    text = ablation.REPORT.render(result, "ablation_csgd.json")
    assert "| tree, CSGD | 0.50 M | 2.50 (2.40 to 2.60) |" in text
    assert "| chain, without CSGD |" in text
    assert "Not by the recipe" not in text

    run(tmp_path, monkeypatch, "--only", "csgd")

    assert (len(commands.trained), len(commands.measured)) == (2, 4)  # nothing is done twice


def test_forms_say_beside_their_table_what_all_of_them_change_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Commands(monkeypatch)

    run(tmp_path, monkeypatch, "--only", "forms")

    assert len(commands.trained) == len(commands.measured) == 7
    assert all(command.draft_tree is None for (command,) in commands.measured)
    passes = {command.drafter_config[0]: args.draft_tree_passes for command, args, _, _ in commands.trained}
    assert [args.draft_tree_passes for _, args, _, _ in commands.trained] == [2, 4, 2, 1, 2, 2, 2], passes
    text = ablation.REPORT.render(
        json.loads((tmp_path / "ablation.json").read_text(encoding="utf-8")), "ablation.json"
    )
    for name in ("learning_rate=2e-3", "feature_loss_weight=0.1", "token_loss_weight=1.0", "attention_bias=true"):
        assert name in text
    assert "block_position_embedding=true" in text
