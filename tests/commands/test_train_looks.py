"""What `falcon-spec train` shows without training, and the data it refuses."""

import json
import re
from pathlib import Path

import pytest

from tests.chat import make_rows, save_target, write_rows
from tests.training.runs import SMALL
from transformers_falcon_spec import cli


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command with a target and twelve conversations, one of them twice; all but where it writes."""
    folder = tmp_path_factory.mktemp("files")
    rows = make_rows(12)
    data = write_rows(folder / "data.jsonl", [*rows, rows[3]])
    options = ["--target", str(save_target(folder / "target", **SMALL)), "--data", str(data), "--use_cpu"]
    return ["train", *options, "--report_to", "none", "--per_device_train_batch_size", "4"]


def words(text: str) -> str:
    """Text without the lines and breaks of a table."""
    return " ".join(text.replace("│", " ").split())


def test_masks_are_shown_and_nothing_is_trained(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"

    status = cli.main([*command, "--output_dir", str(folder), "--show_masks", "2"])

    text = capsys.readouterr().out
    assert status == 0
    assert words(text).count("data.jsonl, line") == 2
    assert f"⟦{make_rows(12)[0][1]['content']}</s>⟧" in words(text).replace("⟦ ", "⟦")
    assert "2 examples," in words(text)  # of twelve rows: no others are encoded
    assert not folder.exists()


def test_five_masks_are_shown_unless_asked_otherwise(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main([*command, "--show_masks", "--limit", "8"])

    assert status == 0
    assert words(capsys.readouterr().out).count("data.jsonl, line") == 5


def test_masks_need_only_the_tokenizer_of_a_target(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(command[2])
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            (tmp_path / name).write_bytes((source / name).read_bytes())

    assert cli.main([*command, "--target", str(tmp_path), "--show_masks", "1"]) == 0


def test_a_dry_run_says_what_it_would_take_and_leaves_nothing(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cache = tmp_path / "out", tmp_path / "cache"
    options = ["--output_dir", str(folder), "--cache_features", str(cache), "--num_train_epochs", "2", "--dry_run"]

    status = cli.main([*command, *options])

    text = words(capsys.readouterr().out)
    assert status == 0
    assert "Nothing was trained or written." in text
    assert "12 examples," in text
    assert "drafter FalconSpecDrafter" in text
    assert "M weights, of which" in text
    assert "steps 6, 2.0 epochs" in text
    assert "memory about" in text
    assert "GB on disk with `--cache_features`" in text
    assert list(tmp_path.iterdir()) == []


def test_the_plan_says_what_a_short_list_of_tokens_holds(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--output_dir", str(tmp_path / "out"), "--drafter_config", "draft_vocab_size=20", "--dry_run"]

    status = cli.main([*command, *options])

    text = words(capsys.readouterr().out)
    assert status == 0
    assert re.search(
        r"draft vocabulary 20 of 97 tokens the most frequent ones, \d\d\.\d% of what the answers say", text
    )
    assert "3.0 is chance of guesses at random among 20 tokens" in text


def test_a_repeated_conversation_is_trained_on_once(
    command: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main([*command, "--output_dir", str(tmp_path), "--max_steps", "1"]) == 0

    record = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))
    assert record["num_examples"] == 12
    assert "the same conversation was read before" in caplog.text
