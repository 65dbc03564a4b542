"""The command line itself: help, exit codes, and where messages go."""

import dataclasses
import importlib

import pytest

from transformers_falcon_spec import cli


def option_names(command: str) -> list[str]:
    """Every field of the dataclasses that a command takes."""
    names = []
    for place in cli.COMMANDS[command].options:
        module, _, name = place.partition(":")
        options = getattr(importlib.import_module(f"transformers_falcon_spec.{module}"), name)
        names += [field.name for field in dataclasses.fields(options) if field.init]
    return names


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_the_help_of_a_command_names_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command.split(), "--help"])

    text = capsys.readouterr().out
    assert end.value.code == 0
    assert f"falcon-spec {command}" in text
    assert option_names(command)
    words = set(text.replace("[", " ").replace("]", " ").split())
    assert [name for name in option_names(command) if not {f"--{name}", name.upper()} & words] == []


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["fly"], 2), (["--fly"], 2), (["--help"], 0), (["-h"], 0)])
def test_anything_but_a_command_shows_them_all(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == status

    shown = "".join(capsys.readouterr())
    assert all(f"  {name} " in shown and command.summary in shown for name, command in cli.COMMANDS.items())


def test_an_unknown_option_ends_with_2_and_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["regenerate", "--target", "t", "--data", "d", "--output", "o", "--fly", "high"])

    assert end.value.code == 2
    assert "--fly" in capsys.readouterr().err
