"""Reads the options of a script of the lab, which are declared as those of `falcon-spec` are."""

from collections.abc import Sequence
from typing import TypeVar

from transformers_falcon_spec.cli import Parser

Options = TypeVar("Options")


def parsed(kind: type[Options], description: str | None, argv: Sequence[str] | None) -> Options:
    """The options on the command line as a `kind`, a dataclass of options; `--help` shows `description`."""
    parser = Parser([kind], "python -m lab")
    parser.add_argument("-h", "--help", action="help")
    parser.description = description
    (options,) = parser.parsed(argv)
    return options
