"""The command line itself: help, exit codes, and where messages go."""

import dataclasses
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from transformers_falcon_spec import cli


def option_names(command: str) -> list[str]:
    """Every field of the dataclasses that a command takes."""
    return [field.name for kind in cli.options_of(command) for field in dataclasses.fields(kind) if field.init]


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_the_help_of_a_command_names_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main([*command.split(), "--help_all"])

    text = capsys.readouterr().out
    assert status == 0
    assert f"falcon-spec {command}" in text
    assert option_names(command)
    words = set(text.split())
    assert [name for name in option_names(command) if not {f"--{name}", name.upper()} & words] == []


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["fly"], 2), (["--fly"], 2), (["--help"], 0), (["-h"], 0)])
def test_anything_but_a_command_shows_them_all(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == status

    out, err = capsys.readouterr()
    shown = err if status else out
    assert all(f"  {name} " in shown and summary in shown for name, summary in cli.COMMANDS.items())


def test_an_unknown_command_ends_with_2_and_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["climb", "--high"]) == 2
    assert "needs one of these commands, but it got `climb`." in capsys.readouterr().err


def test_an_unknown_option_ends_with_2_and_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["regenerate", "--target", "t", "--data", "d", "--output", "o", "--fly", "high"])

    assert end.value.code == 2
    assert "--fly" in capsys.readouterr().err


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"falcon-spec {version('transformers_falcon_spec')}\n"


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_answers_before_pytorch_or_transformers_are_loaded(command: str) -> None:
    lines = [
        "import sys",
        f"sys.argv = ['/usr/bin/falcon-spec', {command!r}, '--help']",
        "from transformers_falcon_spec.cli import main",
        "main()",
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))",
    ]

    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert f"falcon-spec {command}: " in result.stdout


@pytest.mark.commands
def test_the_package_is_a_program_with_the_same_commands() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "transformers_falcon_spec", "--help"], capture_output=True, text=True, check=True
    )

    assert result.stdout.startswith("usage: falcon-spec COMMAND")


@pytest.mark.commands
def test_the_module_of_the_command_line_is_a_program_too() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "transformers_falcon_spec.cli", "--version"], capture_output=True, text=True, check=True
    )

    assert result.stdout == f"falcon-spec {version('transformers_falcon_spec')}\n"


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main([*command.split(), "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_shows_shared_options_in_groups_behind_the_commands_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("parity", capsys)

    groups = ["options of its own:", "The target and the drafter:", "The prompts, and the length of the texts:"]
    assert all(text.count(group) == 1 for group in groups)
    assert sorted(groups, key=text.index) == groups
    marks = text.index(groups[0]), text.rindex("--tune "), text.index(groups[1]), text.rindex("--dtype ")
    assert list(marks) == sorted(marks)


def test_help_says_what_must_be_given_and_which_defaults_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("train", capsys)

    assert "--target TARGET Folder or Hub name of the target. (required)" in text
    assert "By recipe: 0.002 (default, falcon), 0.0005 (paper, falcon); otherwise 0.0005." in text
    assert "--bf16 Train in bfloat16. By default on CUDA where the GPU has it." in text
    assert "--no_use_glancing" in text
    assert "--hub_private_repo" not in text
    assert "`TrainingArguments` of `transformers` can be given, too: `falcon-spec train --help_all`." in text


def test_a_module_of_ones_own_is_imported_before_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_own_drafter.py").write_text("print('imported first')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])

    status = cli.main(["trees", "--import", "my_own_drafter", "--help"])

    assert status == 0
    assert capsys.readouterr().out.startswith("imported first\nusage: falcon-spec trees")


def test_a_module_that_is_not_there_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])

    assert cli.main(["serve", "--import", "my_own_drafters"]) == 1
    assert "`--import` must name a module that Python finds" in capsys.readouterr().err
