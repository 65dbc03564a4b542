"""`falcon-spec regenerate`: from a target on disk and prompts to the target's own answers."""

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.chat import make_rows, make_tokenizer, save_target, write_rows
from tests.tiny import make_target
from tests.training.runs import SMALL
from transformers_falcon_spec import cli
from transformers_falcon_spec.training.conversations import read_conversations


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command with a target and a file of conversations, all but where it writes."""
    folder = tmp_path_factory.mktemp("files")
    target = save_target(folder / "target", **SMALL)
    data = write_rows(folder / "data.jsonl", make_rows(5))
    options = ["--target", str(target), "--data", str(data), "--max_new_tokens", "6", "--batch_size", "2"]
    return ["regenerate", *options, "--device", "cpu"]


def test_answers_are_written_as_the_trainer_reads_them(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "deep" / "out.jsonl"

    status = cli.main([*command, "--output", str(output)])

    found = read_conversations(output)
    assert status == 0
    assert (len(found.rows), found.reasons) == (5, {})
    assert capsys.readouterr().out.strip().endswith(f"5 conversations in {output}")


def test_the_same_command_again_goes_on_and_another_is_refused(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    cli.main([*command, "--output", str(output)])
    before = output.read_bytes()

    again = cli.main([*command, "--output", str(output)])
    other = cli.main([*command, "--output", str(output), "--seed", "1"])

    assert (again, other) == (0, 1)
    assert output.read_bytes() == before
    assert "OptionError:" in capsys.readouterr().err


def test_a_limit_answers_the_first_rows(command: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"

    cli.main([*command, "--output", str(output), "--limit", "2"])

    rows = [json.loads(line)["row"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert sorted(rows) == [0, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--data", "nowhere.jsonl"], "ConversationError: The data file `nowhere.jsonl` does not exist"),
        (["--limit", "0"], "OptionError: `limit` must be at least 1, but it is 0"),
        (["--temperature", "nan"], "OptionError: `temperature` must be at least 0, but it is nan"),
        (
            ["--max_prompt_tokens", "1"],
            "ConversationError: At least one conversation must get an answer, but none did",
        ),
        (["--output", "out.csv"], "OptionError: `output` must end in .jsonl, .ndjson or .json, as `train` reads it"),
        (["--output", "out.jsonl.gz"], "OptionError: `output` must end in .jsonl, .ndjson or .json"),
        (["--endpoint_model", "mine"], "OptionError: `endpoint_model` must come with `endpoint`"),
        (["--batch_size", "0"], "OptionError: `batch_size` must be at least 1, but it is 0"),
    ],
)
def test_what_is_wrong_is_said_on_the_error_stream_with_status_1(
    command: list[str], tmp_path: Path, options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = cli.main([*command, "--output", str(tmp_path / "out.jsonl"), *options])

    assert status == 1
    assert text in capsys.readouterr().err


def test_questions_at_the_end_are_answered(command: list[str], tmp_path: Path) -> None:
    output, row = tmp_path / "out.jsonl", make_rows(1)[0]
    data = write_rows(tmp_path / "asked.jsonl", [row[:1], [*row, row[0]]])

    status = cli.main([*command, "--output", str(output), "--data", str(data), "--max_new_tokens", "40"])

    rows = [json.loads(line)["messages"] for line in output.read_text(encoding="utf-8").splitlines()]
    assert status == 0
    assert all(turn["role"] == "assistant" and turn["content"] for found in rows for turn in found[1::2])
    assert sorted(len(found) for found in rows)[0] == 2
    assert [found[0] for found in rows] == [row[0]] * 2


def test_an_adapter_answers_with_the_tokenizer_of_its_base(command: list[str], tmp_path: Path) -> None:
    base, folder, output = command[command.index("--target") + 1], tmp_path / "adapter", tmp_path / "out.jsonl"
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)

    status = cli.main([*command, "--target", str(folder), "--output", str(output), "--temperature", "0"])
    cli.main([*command, "--output", str(tmp_path / "base.jsonl"), "--temperature", "0"])

    assert status == 0
    assert len(output.read_text(encoding="utf-8").splitlines()) == 5
    assert output.read_text(encoding="utf-8") != (tmp_path / "base.jsonl").read_text(encoding="utf-8")


def test_a_target_that_cannot_be_drafted_for_is_refused_before_it_answers(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = tmp_path / "rwkv", tmp_path / "out.jsonl"
    make_target("rwkv").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)

    status = cli.main([*command, "--target", str(folder), "--output", str(output)])

    assert status == 1
    assert (
        "`train` refuses this target. `RwkvForCausalLM` keeps a state outside of the recurrent layers"
        in capsys.readouterr().err
    )
    assert not output.exists()
