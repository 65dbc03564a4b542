"""Runs one command of `falcon-spec`: parses its options, hands them to its module in `commands/`, and says what went wrong."""

import importlib
import logging
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import Field, is_dataclass
from types import ModuleType
from typing import Any, get_type_hints

from transformers.hf_argparser import DataClassType, HfArgumentParser

from _falcon_spec import COMMANDS, main

from .errors import FalconSpecError

__all__ = ["COMMANDS", "main", "module_of", "options_of", "run"]


def run(name: str, argv: list[str]) -> int:
    """Run the command of this name with the options `argv`; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    module = module_of(name)
    parser = _Parser(options_of(name), prog=f"falcon-spec {name}", description=module.__doc__, formatter_class=_Help)
    try:
        *options, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
        if unknown:
            parser.error(f"unknown arguments: {' '.join(unknown)}")
        given = [parser.given(argv)] if "given" in get_type_hints(module.run) else []
        module.run(*options, *given)
    except (FalconSpecError, OSError) as error:  # files, the disk and the network tell what is wrong in words
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def module_of(name: str) -> ModuleType:
    """The module of a command: its docstring is the help, its `run` does the work."""
    return importlib.import_module(f".commands.{name.replace(' ', '_')}", __package__)


def options_of(name: str) -> list[DataClassType]:
    """The dataclasses that hold a command's options: those that its `run` takes.

    A `run` that takes `given` as well is told the names of the options on the command line.
    """
    hints = get_type_hints(module_of(name).run)
    return [DataClassType(hint) for hint in hints.values() if is_dataclass(hint)]


class _Parser(HfArgumentParser):
    """Takes fields with `positional` in their metadata by place, without a name."""

    def given(self, argv: list[str]) -> frozenset[str]:
        """Names of the options that `argv` gives, whatever their values; all others keep what stands there before."""
        unset = object()
        namespace = Namespace(**dict.fromkeys((action.dest for action in self._actions), unset))
        self.parse_known_args(argv, namespace)
        return frozenset(name for name, value in vars(namespace).items() if value is not unset)

    @staticmethod
    def _parse_dataclass_field(parser: ArgumentParser, field: "Field[Any]") -> None:
        if field.metadata.get("positional"):
            parser.add_argument(field.name, type=field.type, help=field.metadata["help"], metavar=field.name.upper())
        else:
            HfArgumentParser._parse_dataclass_field(parser, field)


class _Help(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the lines of a description as they are written."""


if __name__ == "__main__":
    sys.exit(main())
