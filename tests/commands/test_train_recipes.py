"""`falcon-spec train`: recipes, what is given on the command line, and stopping early."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chat import make_rows, save_target, write_rows
from tests.training.runs import SMALL
from transformers_falcon_spec import EagleDrafter, FalconSpecDrafter, cli
from transformers_falcon_spec.drafters.falcon import paper_tree

WIDTH = SMALL["hidden_size"]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run of two steps, all but where it writes."""
    folder = tmp_path_factory.mktemp("files")
    target = save_target(folder / "target", **SMALL)
    data = [str(write_rows(folder / f"{name}.jsonl", make_rows(num, seed=num))) for name, num in (("a", 8), ("b", 4))]
    files = ["--target", str(target), "--data", data[0], "--eval_data", data[1]]
    quick = ["--max_steps", "2", "--per_device_train_batch_size", "4", "--use_cpu", "--report_to", "none"]
    return ["train", *files, *quick, "--eval_decode_prompts", "2", "--eval_decode_tokens", "6"]


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))


def test_the_default_recipe_is_the_one_that_was_measured(command: list[str], tmp_path: Path) -> None:
    status = cli.main([*command, "--output_dir", str(tmp_path), "--logging_steps", "1"])

    drafter, record = FalconSpecDrafter.from_pretrained(tmp_path), record_of(tmp_path)
    config = drafter.config
    assert status == 0
    assert (drafter.is_tree_dynamic, drafter.num_text_tokens) == (True, 10)  # as it was evaluated, too
    assert (config.block_size, config.recurrence, config.shortcut, config.newest_row) == (3, "token", True, True)
    assert (config.attention_bias, config.transition_rank) == (False, 64)
    assert record["recipe"]["name"] == "default"
    assert record["recipe"]["drafter_config"]["transition_rank"] == 64
    found = record["recipe"]["training"]
    rate = 2e-3 * (256 / WIDTH) ** 0.5
    assert found == {
        "learning_rate": pytest.approx(rate),
        "warmup_steps": 0.025,
        "lr_scheduler_type": "cosine",
        "feature_loss_weight": 0.1,
        "token_loss_weight": 1.0,
        "use_glancing": False,
    }
    rates = [entry["learning_rate"] for entry in record["curve"] if "learning_rate" in entry]
    assert max(rates) == pytest.approx(rate)  # it reached the optimiser


def test_what_is_given_wins_over_the_recipe_even_where_it_is_the_default_of_the_option(
    command: list[str], tmp_path: Path
) -> None:
    given = ["--learning_rate", "5e-4", "--use_glancing", "true", "--drafter_config", "block_size=2", "shortcut=false"]

    status = cli.main([*command, "--output_dir", str(tmp_path), *given])

    config, found = FalconSpecDrafter.from_pretrained(tmp_path).config, record_of(tmp_path)["recipe"]
    assert status == 0
    assert (config.block_size, config.shortcut, config.recurrence) == (2, False, "token")
    assert (found["training"]["learning_rate"], found["training"]["use_glancing"]) == (5e-4, True)
    assert found["training"]["token_loss_weight"] == 1.0
    assert found["drafter_config"]["block_size"] == 2


def test_the_papers_recipe_is_kept(command: list[str], tmp_path: Path) -> None:
    status = cli.main([*command, "--output_dir", str(tmp_path), "--recipe", "paper"])

    config, found = FalconSpecDrafter.from_pretrained(tmp_path).config, record_of(tmp_path)["recipe"]
    assert status == 0
    assert (config.block_size, config.recurrence, config.transition_rank) == (2, "sequence", None)
    assert not config.shortcut
    assert not config.block_position_embedding
    assert config.num_hidden_layers == 2
    assert config.draft_tree == paper_tree().to_json()  # held-out data replaces it by none that was fitted
    assert "eval_acceptance_at_depth_4" in record_of(tmp_path)["curve"][-1]  # of more passes than one
    assert found["name"] == "paper"
    assert (found["training"]["feature_loss_weight"], found["training"]["token_loss_weight"]) == (1.0, 0.1)
    assert (found["training"]["use_glancing"], found["training"]["glancing_ratio"]) == (True, 0.4)


def test_a_tree_that_is_asked_for_is_fitted_by_the_papers_recipe_too(command: list[str], tmp_path: Path) -> None:
    fitted = ["--draft_tree_nodes", "6"]

    status = cli.main([*command, "--output_dir", str(tmp_path), "--recipe", "paper", *fitted])

    tree = FalconSpecDrafter.from_pretrained(tmp_path).draft_tree
    assert status == 0
    assert (len(tree), int(tree.depths.max())) <= (6, 2)


def test_other_methods_are_trained_as_before(command: list[str], tmp_path: Path) -> None:
    status = cli.main([*command, "--output_dir", str(tmp_path), "--method", "eagle"])

    assert status == 0
    assert EagleDrafter.from_pretrained(tmp_path).config.version == 1
    assert record_of(tmp_path)["recipe"] == {"name": "default", "training": {}, "drafter_config": {}}


@pytest.mark.parametrize("cached", [False, True])
def test_the_record_says_what_decoding_brought(command: list[str], tmp_path: Path, cached: bool) -> None:
    options = ["--cache_features", str(tmp_path / "features")] if cached else []

    assert cli.main([*command, "--output_dir", str(tmp_path / "out"), *options]) == 0

    last = record_of(tmp_path / "out")["curve"][-1]
    assert last["eval_acceptance_length"] >= 1
    assert "eval_acceptance_at_depth_1" in last  # how deep a grown tree is depends on what was learned


def test_a_run_stops_when_evaluations_get_no_better(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", make_rows(20))  # one of them is held out
    stuck = ["--learning_rate", "0", "--max_steps", "9", "--eval_strategy", "steps", "--eval_steps", "1"]
    command = [each for each in command if each != "--eval_data" and not each.endswith("b.jsonl")]
    best = ["--metric_for_best_model", "acceptance_length", "--load_best_model_at_end", "true", "--save_steps", "1"]

    status = cli.main(
        [*command, "--data", str(data), *stuck, *best, "--early_stopping_patience", "2", "--output_dir", str(tmp_path)]
    )

    curve = record_of(tmp_path)["curve"]
    assert status == 0
    assert [entry["step"] for entry in curve if "train_runtime" in entry] == [3]
    assert "eval_loss" in (shown := capsys.readouterr().out)
    assert "_rank_" not in shown  # they are for the record
    assert any("eval_rank_0_at_1" in entry for entry in curve)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--recipe", "paper", "--method", "eagle"], "OptionError: The recipe `paper` is one for `falcon`"),
    ],
)
def test_what_does_not_go_together_is_refused(
    command: list[str], tmp_path: Path, options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = cli.main([*command, "--output_dir", str(tmp_path), *options])

    assert status == 1
    assert text in capsys.readouterr().err


def test_the_help_says_what_the_recipes_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0

    text = "".join(capsys.readouterr().out.split())
    assert "Byrecipe:0.002(default,falcon),0.0005(paper,falcon);otherwise0.0005." in text
    assert "num_hidden_layers=2recurrence=sequence" in text
