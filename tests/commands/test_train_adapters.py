"""`falcon-spec train --drafter ... --use_peft`: training an adapter that every command loads like a drafter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import runs
from tests.adapters import adapted, saved_drafter
from tests.chat import make_rows, save_target, write_rows
from tests.training.runs import SMALL
from transformers_falcon_spec import FalconSpecDrafter, cli
from transformers_falcon_spec.commands.loading import load_target

QUICK = ["--max_steps", "4", "--per_device_train_batch_size", "4", "--use_cpu", "--report_to", "none"]
LORA = ["--use_peft", "--lora_r", "4"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, its adapter, a drafter, and conversations."""
    folder = tmp_path_factory.mktemp("files")
    target = save_target(folder / "target", **SMALL)
    adapted(load_target(str(target), "auto", "cpu")[0]).save_pretrained(folder / "tuned")
    return {
        "target": str(target),
        "tuned": str(folder / "tuned"),
        "drafter": str(saved_drafter("falcon, as shipped", folder / "drafter", **SMALL)),
        "data": str(write_rows(folder / "data.jsonl", make_rows(12))),
        "eval_data": str(write_rows(folder / "eval.jsonl", make_rows(4, seed=1))),
    }


def command(files: dict[str, str], folder: Path, *options: str) -> list[str]:
    common = ["--target", files["tuned"], "--drafter", files["drafter"], "--data", files["data"]]
    return ["train", *common, "--output_dir", str(folder), *QUICK, *options]


@pytest.fixture(scope="module")
def adapter(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four steps leave behind."""
    folder = tmp_path_factory.mktemp("adapter")
    options = [*LORA, "--eval_data", files["eval_data"], "--draft_tree_nodes", "7", "--save_steps", "2"]
    assert cli.main(command(files, folder, *options)) == 0
    return folder


def test_the_folder_holds_the_adapter_its_tree_and_its_record_alone(adapter: Path, files: dict[str, str]) -> None:
    record = json.loads((adapter / "training.json").read_text(encoding="utf-8"))
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))

    assert {path.name for path in adapter.iterdir() if path.is_file()} == {
        *("README.md", "adapter_config.json", "adapter_model.safetensors"),
        *("generation_config.json", "training.json"),
    }
    assert (config["base_model_name_or_path"], config["r"]) == (files["drafter"], 4)
    assert {"command", "commit", "date", "versions", "device", "train_seconds", "curve"} <= set(record)
    assert len(FalconSpecDrafter.from_pretrained(adapter).draft_tree) == 7


def test_the_adapter_drafts_for_the_tuned_target_in_every_command(
    adapter: Path, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ["--target", files["tuned"], "--drafter", str(adapter)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one plus two"}\n')
    output = tmp_path / "parity.json"

    statuses = [
        cli.main(["generate", *pair, "--prompt", "one plus two", "--max_new_tokens", "8", "--compare"]),
        cli.main(["parity", *pair, "--prompts", str(prompts), "--max_new_tokens", "8", "--output", str(output)]),
        cli.main(
            ["bench", "--target", files["tuned"], "--methods", str(adapter), "--prompts", str(prompts),
             "--decodings", "greedy", "--max_new_tokens", "8", "--output", str(tmp_path / "bench.json")]
        ),
    ]  # fmt: skip

    assert statuses == [0, 0, 0], capsys.readouterr().err
    assert json.loads(output.read_text(encoding="utf-8"))["rows"][0]["identical"] == 1


def test_the_run_goes_on_from_its_checkpoint(adapter: Path, files: dict[str, str], tmp_path: Path) -> None:
    options = [*LORA, "--eval_data", files["eval_data"], "--draft_tree_nodes", "7"]

    status = cli.main(command(files, tmp_path, *options, "--resume_from_checkpoint", str(adapter / "checkpoint-2")))

    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path))
    assert status == 0
    assert all(value.equal(other[name]) for name, value in one.items())


def test_without_an_adapter_the_drafter_itself_is_trained_further(files: dict[str, str], tmp_path: Path) -> None:
    status = cli.main(command(files, tmp_path, "--learning_rate", "1e-6"))

    before, after = (FalconSpecDrafter.from_pretrained(folder) for folder in (files["drafter"], tmp_path))
    pairs = list(zip(before.parameters(), after.parameters(), strict=True))
    assert status == 0
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in pairs)
    assert not all(one.equal(other) for one, other in pairs)


def test_a_draft_model_takes_an_adapter_too(files: dict[str, str], tmp_path: Path) -> None:
    status = cli.main(command(files, tmp_path, *LORA, "--drafter", files["target"]))

    draft, target = (AutoModelForCausalLM.from_pretrained(name).double() for name in (tmp_path, files["tuned"]))
    texts = [
        runs.plain(target, eos_token_id=None, **options).sequences for options in ({}, {"assistant_model": draft})
    ]
    assert status == 0
    assert texts[0].tolist() == texts[1].tolist()
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == files["target"]


def test_features_of_a_tuned_target_are_cached_for_its_adapter(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ["--cache_features", str(tmp_path / "features")]
    assert cli.main(command(files, tmp_path / "one", *LORA, *cache)) == 0

    status = cli.main(command(files, tmp_path / "other", *LORA, *cache, "--target", files["target"]))

    assert status == 1
    assert "must hold features of this target and data" in capsys.readouterr().err


def test_a_dry_run_names_the_drafter_and_what_is_trained(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    assert cli.main(command(files, tmp_path, *LORA, "--dry_run")) == 0

    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "drafter FalconSpecDrafter with an adapter" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--lora_r", "8"], "OptionError: `--lora_r` must come with `--use_peft`"),
        ([*LORA, "--method", "falcon"], "leave out `--method` and `--drafter_config`"),
        (["--drafter_config", "block_size=3"], "leave out `--method` and `--drafter_config`"),
        ([*LORA, "--lora_target_modules", "nowhere"], "OptionError: `lora_target_modules` must name linear layers"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: list[str], text: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(files, tmp_path, *options)) == 1
    assert text in capsys.readouterr().err


def test_an_adapter_needs_a_drafter_that_is_there(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "train",
        "--target",
        files["target"],
        "--data",
        files["data"],
        "--output_dir",
        str(tmp_path),
        *QUICK,
        *LORA,
    ]

    assert cli.main(line) == 1
    assert "OptionError: `--use_peft` needs `--drafter`" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[], ["--lora_modules_to_save", "recurrence"]])
def test_two_processes_train_one_adapter(parts: list[str], files: dict[str, str], tmp_path: Path) -> None:
    line = command(files, tmp_path, *LORA, *parts, "--max_steps", "3", "--per_device_train_batch_size", "2")
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29513"]

    done = subprocess.run(
        [sys.executable, *launcher, "-m", "transformers_falcon_spec", *line, "--logging_steps", "1"],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert record["curve"][-1]["epoch"] == 1.0  # 12 rows in 3 steps of 2 rows: two processes, not one
    assert (tmp_path / "adapter_model.safetensors").is_file()
