"""`falcon-spec train --target X --data Y` and nothing else: it plans, trains, evaluates once, and says what came of it."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chat import make_rows, make_tokenizer, save_target, write_rows
from tests.families import FAMILIES
from tests.tiny import make_target
from tests.training.runs import SMALL
from transformers_falcon_spec import FalconSpecDrafter, cli
from transformers_falcon_spec.commands.train_report import summary
from transformers_falcon_spec.training import recipes as run_plan
from transformers_falcon_spec.training.trainer import DrafterTrainer

RECURRENT = next(name for name, family in FAMILIES.items() if family.form == "refused")


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The steps at which something was evaluated."""
    steps: list[int] = []
    evaluate = DrafterTrainer.evaluate
    monkeypatch.setattr(
        DrafterTrainer,
        "evaluate",
        lambda self, *args, **kwargs: (steps.append(self.state.global_step), evaluate(self, *args, **kwargs))[1],
    )
    return steps


def run(folder: Path, num_rows: int, *options: str) -> int:
    """Train in `folder`, on one thread and in two epochs at most, which is all that is short of the real thing."""
    return train_on(folder, make_rows(num_rows), *options)


def train_on(folder: Path, rows: list[list[dict[str, str]]], *options: str) -> int:
    """Train in `folder` on these rows."""
    save_target(folder / "target", **SMALL)
    write_rows(folder / "data.jsonl", rows)
    return cli.main(["train", "--target", "target", "--data", "data.jsonl", *options])


def test_target_and_data_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], evaluations: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_plan, "MOST_EPOCHS", 2)

    status = run(tmp_path, 40)

    out = " ".join(capsys.readouterr().out.split())
    record = json.loads((tmp_path / "target-falcon" / "training.json").read_text(encoding="utf-8"))
    drafter = FalconSpecDrafter.from_pretrained("target-falcon")
    assert status == 0
    assert record["num_examples"] == 38  # two of forty are held out
    assert [name for name in ("precision", "batch", "steps", "weights") if name not in out] == []
    assert "10, 2.0 epochs" in out
    vocab_size = drafter.config.vocab_size
    assert f"{math.log(vocab_size):.1f} is chance" in out
    first = next(row for row in record["curve"] if "cross_entropy" in row)
    assert first["cross_entropy"] < math.log(vocab_size) + 0.5  # where a fresh drafter starts
    assert "On held-out text its best token is the target's" in out
    assert "A step writes" in out
    assert "falcon-spec generate --target target --drafter target-falcon" in out
    assert evaluations == [10]
    assert drafter.config.draft_tree is not None
    assert out.index("The plan") < out.index("Trained for")


def test_an_evaluation_of_the_last_step_is_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluations: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = ["--max_steps", "4", "--eval_strategy", "steps", "--eval_steps", "2", "--eval_decode_prompts", "0"]

    assert run(tmp_path, 20, *steps) == 0

    assert evaluations == [2, 4]
    assert FalconSpecDrafter.from_pretrained("target-falcon").config.draft_tree is not None


def test_conversations_that_were_held_out_and_cannot_be_used_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = make_rows(20)
    rows[10] = [{"role": "user", "content": "one " * 600}, {"role": "assistant", "content": "two"}]

    assert train_on(tmp_path, rows, "--max_steps", "1", "--max_length", "64") == 0

    assert "Nothing was evaluated: there is no held-out text" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("folder", ["F", "deep/F"])
def test_the_next_command_names_the_whole_folder(folder: str) -> None:
    assert f"from_pretrained('{folder}')" in summary([], None, {"target": "T", "folder": folder}, 1.0, "")


def test_what_was_not_evaluated_is_said() -> None:
    curve: list[dict[str, Any]] = [{"step": 1, "loss": 7.0}, {"step": 2, "loss": 6.5}]

    text = summary(curve, None, {"target": "T", "folder": "F"}, 3.2, "there is no data")

    assert "Trained for 3 s: loss 7 -> 6.5." in text
    assert "Nothing was evaluated: there is no data." in text
    assert "A step writes" not in text


def test_held_out_text_with_nothing_to_draft_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = make_rows(20)
    rows[10] = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": ""}]

    assert train_on(tmp_path, rows, "--max_steps", "1", "--drafter_config", "block_size=8") == 0

    assert "Nothing was evaluated: there is no held-out text" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("more", [[], ["--dry_run"]], ids=["train", "dry run"])
def test_a_target_that_cannot_be_drafted_for_is_refused_before_anything_is_planned(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    target = make_target(RECURRENT)
    make_tokenizer().save_pretrained(tmp_path / "target")
    target.save_pretrained(tmp_path / "target")
    write_rows(tmp_path / "data.jsonl", make_rows(4))

    status = cli.main(["train", "--target", "target", "--data", "data.jsonl", "--method", "medusa", *more])

    said = capsys.readouterr()
    assert status == 1
    assert "rejected drafts cannot be taken back" in said.err
    assert "The plan" not in said.out
