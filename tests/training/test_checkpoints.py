"""Interrupted runs resume from the newest complete checkpoint and continue as if nothing had happened."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.chat import make_rows, save_target, write_rows
from tests.training.killing import kill_in_write
from tests.training.runs import SMALL, loss_curve, make_dataset, make_trainer, same, weights
from transformers_falcon_spec import EagleDrafter, cli
from transformers_falcon_spec.errors import OptionError, TrainingError
from transformers_falcon_spec.training.checkpoints import newest_complete_checkpoint

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

    assert newest_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-100")


@pytest.mark.parametrize("state", ['{"global_step": 9, "epo', "", "{}"])
def test_a_checkpoint_with_a_torn_last_file_is_passed_over(
    tmp_path: Path, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, 6)
    torn = make_checkpoint(tmp_path, 9, state)

    found = newest_complete_checkpoint(tmp_path)

    assert found == str(tmp_path / "checkpoint-6")
    assert f"Passed over `{torn}`" in caplog.text


def test_a_checkpoint_without_its_last_file_is_passed_over(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 6)
    (make_checkpoint(tmp_path, 9) / STATE).unlink()

    assert newest_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "logs").mkdir()

    assert newest_complete_checkpoint(tmp_path) is None
    assert newest_complete_checkpoint(tmp_path / "nowhere") is None


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: writing on fails inside the system call, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class StopAfter(TrainerCallback):
    """Leaves the run after so many steps."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.num_steps


@pytest.mark.parametrize("num_bytes", [50_000, 180_000], ids=["in the weights", "in the optimiser's state"])
def test_a_full_disk_ends_the_run_in_words_and_loses_only_the_steps_since_the_checkpoint(
    tmp_path: Path, num_bytes: int
) -> None:
    folder = tmp_path / "run"
    whole = make_trainer(folder)
    whole.train()
    begun = make_trainer(folder, **SAVING)
    begun.add_callback(StopAfter(4))
    begun.train()
    num_weight_bytes = (folder / "checkpoint-3" / WEIGHTS).stat().st_size

    crashed = make_trainer(folder, **SAVING)
    with (
        full_disk(num_bytes),
        pytest.raises(TrainingError, match=r"must take what the run writes.*--resume_from_check"),
    ):
        crashed.train(resume_from_checkpoint=newest_complete_checkpoint(folder))

    assert (folder / "checkpoint-6" / "optimizer.pt").exists() == (num_bytes > num_weight_bytes)
    assert newest_complete_checkpoint(folder) == str(folder / "checkpoint-3")
    resumed = make_trainer(folder, **SAVING)
    resumed.train(resume_from_checkpoint=newest_complete_checkpoint(folder))
    assert same(weights(whole), weights(resumed))


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


# safetensors and torch write in ways of their own; that any file may be damaged is tested without a process.
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

    assert newest_complete_checkpoint(folder) == str(folder / "checkpoint-2")
    assert cli.main([*saving, "--resume_from_checkpoint", "true"]) == 0
    assert newest_complete_checkpoint(folder) == str(folder / "checkpoint-6")
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


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has taken half of its steps; tests that change it copy it."""
    return begun(tmp_path_factory.mktemp("half")).parent


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"learning_rate": 1e-4}, r"`learning_rate` was 0\.01 and is 0\.0001"),
    "schedule": ({"lr_scheduler_type": "cosine"}, "`lr_scheduler_type` was .*linear and is .*cosine"),
    "seed": ({"seed": 7}, "`seed` was 42 and is 7"),
    "batch": ({"per_device_train_batch_size": 2}, "`rows of a step` was 4 and is 2"),
    "objective": ({"feature_noise": 0.5}, r"`feature_noise` was 0\.1 and is 0\.5"),
    "block": ({"drafter_options": {"block_size": 3}}, "`drafter_config.block_size` was 2 and is 3"),
    "kind": ({"make": EagleDrafter.from_target}, "`drafter` was FalconSpecDrafter and is EagleDrafter"),
    "data": ({"train_dataset": "other"}, "`data` was [0-9a-f]+ and is [0-9a-f]+"),
    "more data": ({"train_dataset": "more"}, "`rows of the data` was 20 and is 21"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_is_not_resumed_with_settings_that_it_would_not_use_from_its_start(
    name: str, half: Path, tmp_path: Path
) -> None:
    options, message = OTHERS[name]
    data = {"other": lambda: make_dataset(20, seed=5), "more": lambda: make_dataset(21)}
    if options.get("train_dataset") in data:
        options = {"train_dataset": data[options["train_dataset"]]()}

    resumed = make_trainer(tmp_path, **SAVING, **options)
    with pytest.raises(OptionError, match=message):
        resumed.train(resume_from_checkpoint=str(half / "checkpoint-6"))

    assert not resumed.state.global_step


@pytest.mark.parametrize("name", [WEIGHTS, "optimizer.pt", "scheduler.pt", "rng_state.pth"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_checkpoint_with_a_damaged_file_is_passed_over_or_refused_in_words(
    name: str, damage: str, half: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(half, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoint-6" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else content)

    assert newest_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")

    what = "missing" if damage == "missing" else "cut short or damaged"
    assert f"Passed over `{path.parent}`: its file `{name}` is {what}" in caplog.text
    with pytest.raises(TrainingError, match=rf"must be a whole checkpoint .*`{name}` is {what}"):
        make_trainer(tmp_path, **SAVING).train(resume_from_checkpoint=str(path.parent))


def test_a_run_that_has_taken_its_steps_takes_no_more_however_often_it_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_trainer(tmp_path, **SAVING)
    whole.train()

    for steps in (12, 9):  # the second asks for fewer than were taken
        resumed = make_trainer(tmp_path, **{**SAVING, "max_steps": steps})
        resumed.train(resume_from_checkpoint=True)

        assert resumed.state.global_step == 12
        assert same(weights(whole), weights(resumed))
        assert [row.get("loss") for row in resumed.state.log_history if "loss" in row] == loss_curve(whole)
        assert f"12 steps were taken before, and the run is one of {steps}" in caplog.text
    assert not (tmp_path / "checkpoint-13").exists()


def test_more_steps_may_be_asked_for(tmp_path: Path) -> None:
    begun(tmp_path)

    longer = make_trainer(tmp_path, **{**SAVING, "max_steps": 15})
    longer.train(resume_from_checkpoint=True)

    assert longer.state.global_step == 15


def test_a_checkpoint_of_weights_alone_is_refused(tmp_path: Path) -> None:
    checkpoint = begun(tmp_path, save_only_model=True)

    with pytest.raises(TrainingError, match="without the optimiser's state"):
        make_trainer(tmp_path).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.parametrize("max_steps", [-1, 3])
def test_a_run_without_a_step_is_an_error(max_steps: int, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, dataloader_drop_last=True, per_device_train_batch_size=64, max_steps=max_steps)

    with pytest.raises(TrainingError, match=r"must take at least one step, but there are 20 rows for batches of 64"):
        trainer.train()


@pytest.mark.parametrize(
    "options",
    [
        {"num_train_epochs": 0, "max_steps": -1},
        {"per_device_train_batch_size": 0},
        {"per_device_eval_batch_size": 0},
        {"gradient_accumulation_steps": 0},
        {"max_length": 0},
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
