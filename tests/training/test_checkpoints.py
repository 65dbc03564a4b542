"""Interrupted runs resume from the newest complete checkpoint and continue as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.chat import make_rows, save_target, write_rows
from tests.training.killing import kill_in_write
from tests.training.runs import SMALL, make_trainer, same
from transformers_falcon_spec import cli
from transformers_falcon_spec.errors import OptionError, TrainingError
from transformers_falcon_spec.training.trainer import newest_checkpoint

pytestmark = pytest.mark.training

STATE, WEIGHTS = "trainer_state.json", "model.safetensors"
SAVING = {"save_strategy": "steps", "save_steps": 3}


def make_checkpoint(folder: Path, step: int, state: str | None = None) -> Path:
    """An empty checkpoint with its last file."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / STATE).write_text(f'{{"global_step": {step}}}' if state is None else state)
    return path


def test_the_newest_checkpoint_is_that_of_the_highest_step(tmp_path: Path) -> None:
    for step in (90, 100, 5):
        make_checkpoint(tmp_path, step)

    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-100")


def test_a_checkpoint_without_its_last_file_is_passed_over(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 6)
    (make_checkpoint(tmp_path, 9) / STATE).unlink()

    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "logs").mkdir()

    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None


class StopAfter(TrainerCallback):
    """Leaves the run after so many steps."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.num_steps


@pytest.fixture
def train_command(tmp_path: Path) -> list[str]:
    """Options of a run of 60 steps, all but where it writes."""
    target = save_target(tmp_path / "target", **SMALL)
    data = write_rows(tmp_path / "data.jsonl", make_rows(20))
    options = ["--target", str(target), "--data", str(data), "--max_steps", "60", "--per_device_train_batch_size", "4"]
    return [
        "train",
        *options,
        "--use_cpu",
        "--report_to",
        "none",
        "--max_length",
        "64",
        "--drafter_config",
        "block_size=3",
    ]


CONTROL_C = """
import os, signal, sys
from transformers_falcon_spec import cli
from transformers_falcon_spec.training.trainer import DrafterTrainer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start out deaf
save = DrafterTrainer._save_checkpoint
def interrupted(trainer, *args, **kwargs):
    save(trainer, *args, **kwargs)
    if trainer.state.global_step == 4:
        os.kill(os.getpid(), signal.SIGINT)
DrafterTrainer._save_checkpoint = interrupted
sys.exit(cli.main())
"""  # the command itself, with the key pressed at a step that does not depend on the machine


def test_after_control_c_a_run_goes_on_to_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, train_command: list[str]
) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    short = [*train_command, "--max_steps", "8"]
    saving = [*short, "--output_dir", str(folder), "--save_steps", "1"]

    errors = tmp_path / "errors.txt"
    with errors.open("w") as stream:
        process = subprocess.run([sys.executable, "-c", CONTROL_C, *saving], stdout=stream, stderr=stream, check=False)

    assert process.returncode == 130
    assert "Interrupted. Go on from the newest checkpoint with `--resume_from_checkpoint true`" in errors.read_text()
    assert not (folder / WEIGHTS).exists()
    resumed = [
        *short,
        "--output_dir",
        str(folder),
        "--save_strategy",
        "no",
        "--resume_from_checkpoint",
        "true",
    ]
    assert cli.main(resumed) == 0
    assert cli.main([*short, "--output_dir", str(whole), "--save_strategy", "no"]) == 0
    assert same(*(load_file(each / WEIGHTS) for each in (folder, whole)))


KILLED_IN_CHECKPOINT = """
import sys
from transformers_falcon_spec import cli
from transformers_falcon_spec.training.trainer import DrafterTrainer

save = DrafterTrainer._save_checkpoint
def killed(trainer, *args, **kwargs):
    if trainer.state.global_step == 4:
        stand_still_at(int(sys.argv[-1]))
    save(trainer, *args, **kwargs)
DrafterTrainer._save_checkpoint = killed
sys.exit(cli.main(sys.argv[1:-1]))
"""


# Either way the checkpoint lacks its last file, by which it is known to be whole.
@pytest.mark.parametrize("file", [pytest.param(WEIGHTS, marks=pytest.mark.slow), "optimizer.pt"])
def test_killed_in_the_middle_of_a_checkpoint_a_run_goes_on_to_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, train_command: list[str], file: str
) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    short = [*train_command, "--max_steps", "6", "--logging_steps", "1"]
    saving = [*short, "--output_dir", str(folder), "--save_steps", "2"]
    assert cli.main([*short, "--output_dir", str(whole), "--save_steps", "2"]) == 0
    limit = (whole / "checkpoint-4" / file).stat().st_size * 3 // 4
    torn, num_bytes = (".tmp*", 0) if file == WEIGHTS else (file, limit)

    kill_in_write(KILLED_IN_CHECKPOINT, saving, folder / "checkpoint-4" / torn, limit, num_bytes)

    assert newest_checkpoint(folder) == str(folder / "checkpoint-2")
    assert cli.main([*saving, "--resume_from_checkpoint", "true"]) == 0
    assert newest_checkpoint(folder) == str(folder / "checkpoint-6")
    for part in (WEIGHTS, f"checkpoint-4/{WEIGHTS}"):
        assert same(*(load_file(each / part) for each in (folder, whole)))
    curves = [json.loads((each / "training.json").read_text())["curve"] for each in (folder, whole)]
    losses = [[entry["loss"] for entry in curve if "loss" in entry] for curve in curves]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def begun(folder: Path, **options: Any) -> Path:
    """The checkpoint after half of a run of 12 steps."""
    trainer = make_trainer(folder, **SAVING, **options)
    trainer.add_callback(StopAfter(6))
    trainer.train()
    return folder / "checkpoint-6"


def test_more_steps_may_be_asked_for(tmp_path: Path) -> None:
    begun(tmp_path)

    longer = make_trainer(tmp_path, **{**SAVING, "max_steps": 15})
    longer.train(resume_from_checkpoint=True)

    assert longer.state.global_step == 15


def test_weights_without_optimizer_and_schedule_are_no_run_to_go_on_with(tmp_path: Path) -> None:
    begun(tmp_path, save_only_model=True)

    with pytest.raises(TrainingError, match=r"must hold optimizer and schedule, .* but it has no `scheduler\.pt`"):
        make_trainer(tmp_path, **SAVING).train(resume_from_checkpoint=True)


def test_a_process_that_does_not_save_waits_for_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(type(trainer.args), "should_save", False)

    trainer.save_model(str(tmp_path / "later"))

    assert not (tmp_path / "later").exists()


def test_a_checkpoint_whose_last_file_was_cut_is_not_whole(tmp_path: Path) -> None:
    state = begun(tmp_path) / "trainer_state.json"
    assert newest_checkpoint(tmp_path) == str(state.parent)

    state.write_text(state.read_text()[:-2])

    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 0},
        {"draft_tree_nodes": -1},
    ],
)
def test_amounts_with_which_nothing_is_trained_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="at least"):
        make_trainer(tmp_path, **options)


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_written_files_follow_the_umask(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        checkpoint = begun(tmp_path)
    finally:
        os.umask(before)

    modes = {path.name: path.stat().st_mode & 0o777 for path in checkpoint.iterdir() if path.is_file()}
    assert WEIGHTS in modes
    assert {name: mode for name, mode in modes.items() if mode & 0o666 != 0o666 & ~mask} == {}
