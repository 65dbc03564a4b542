"""Running one command of `falcon-spec`: its options are parsed, its module is called, and errors are printed."""

import importlib
import logging
import sys
from argparse import Action, ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from inspect import get_annotations
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
    parser.add_notes(module.help_notes() if hasattr(module, "help_notes") else {})
    try:
        *options, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
        if unknown:
            parser.error(f"unknown arguments: {' '.join(unknown)}")
        given = [parser.given(argv)] if "given" in get_type_hints(module.run) else []
        module.run(*options, *given)
    except (FalconSpecError, OSError) as error:  # errors of files and the network have messages for users, too
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def module_of(name: str) -> ModuleType:
    """Import the module of a command: its docstring is the help, its function `run` does the work."""
    return importlib.import_module(f".commands.{name.replace(' ', '_')}", __package__)


def options_of(name: str) -> list[DataClassType]:
    """Return the dataclasses of a command's options, which are the annotations of its function `run`.

    If `run` has an argument `given`, it receives the names of the options on the command line there.
    """
    hints = get_type_hints(module_of(name).run)
    return [DataClassType(hint) for hint in hints.values() if is_dataclass(hint)]


class _Parser(HfArgumentParser):
    """Shows options in groups, and reads fields with `positional` in their metadata as positional arguments."""

    def add_notes(self, notes: Mapping[str, str]) -> None:
        """Append notes to the help of options, which are named by the keys."""
        for action in self._actions:
            if action.dest in notes:
                action.help = f"{action.help} {notes[action.dest]}"

    def _add_dataclass_arguments(self, dtype: DataClassType) -> None:
        """Add a group for each class that declares options, the command's own first; subclasses may redefine them."""
        hints = get_type_hints(dtype)
        classes = [each for each in dtype.__mro__ if "__dataclass_fields__" in vars(each)]
        declared_by = {name: each for each in classes for name in get_annotations(each)}
        for owner in classes:
            group = self._group(vars(owner).get("group") or str(owner.__doc__).strip().split("\n")[0].rstrip("."))
            for each in fields(dtype):
                if each.init and declared_by[each.name] is owner:
                    each.type = hints[each.name]
                    self._parse_dataclass_field(group, each)

    def _group(self, title: str) -> Any:
        known = (group for group in self._action_groups if group.title == title)
        return next(known, None) or self.add_argument_group(title)

    def given(self, argv: list[str]) -> frozenset[str]:
        """Return the names of the options that `argv` gives, even if a value equals the default."""
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
    """Shows defaults, marks required options, and keeps the line breaks of descriptions."""

    def _get_help_string(self, action: Action) -> str | None:
        return f"{action.help} (required)" if action.required else super()._get_help_string(action)


if __name__ == "__main__":
    sys.exit(main())
