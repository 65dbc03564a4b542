"""Reads the options of a script of the lab, which are declared as those of `falcon-spec` are."""

from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import TypeVar

from transformers import HfArgumentParser

Options = TypeVar("Options")


def parsed(kind: type[Options], description: str | None, argv: Sequence[str] | None) -> Options:
    """The options on the command line as a `kind`, a dataclass of `transformers_falcon_spec.commands.options`."""
    parser = HfArgumentParser(kind, description=description, formatter_class=RawDescriptionHelpFormatter)
    (options,) = parser.parse_args_into_dataclasses(None if argv is None else list(argv))
    return options
