"""Running one command of `falcon-spec`: its options are parsed, its module is called, and errors are printed."""

import importlib
import logging
import sys
import textwrap
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from inspect import get_annotations
from types import ModuleType
from typing import Any, get_type_hints

from transformers.hf_argparser import DataClassType, HfArgumentParser

from _falcon_spec import COMMANDS, HELP_ALL, main

from .errors import FalconSpecError

__all__ = ["COMMANDS", "help_of", "main", "module_of", "options_of", "run"]

_PACKAGE = __package__.partition(".")[0]
_WIDTH = 104  # characters of a line of help, without its indent


def run(name: str, argv: list[str]) -> int:
    """Run the command of this name with the options `argv`; returns the exit status."""
    if HELP_ALL in argv:
        print(help_of(name, with_foreign=True), end="")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # not a line for every request to the Hub or a server
    module, parser = module_of(name), _Parser(options_of(name), prog=f"falcon-spec {name}", add_help=False)
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


def help_of(name: str, with_foreign: bool = False) -> str:
    """The help of a command: its options in groups, each with the default that runs.

    Options that another package declares, such as those of `TrainingArguments`, are left out unless the command sets
    them, or `with_foreign` asks for all.
    """
    module = module_of(name)
    notes = module.help_notes() if hasattr(module, "help_notes") else {}
    parser = _Parser(options_of(name), add_help=False)
    parts = [f"falcon-spec {name}: {str(module.__doc__).partition(': ')[2].strip()}"]
    for group, is_foreign in parser.groups():
        is_whole = with_foreign or not is_foreign
        shown = [action for action in group._group_actions if is_whole or action.dest in notes]
        shown = [action for action in shown if action.const is not False]  # `--no_NAME` stands beside `--NAME`
        entries = [_entry(action, notes.get(action.dest, ""), is_whole) for action in shown]
        parts += ["\n".join([f"{group.title}:", *entries])] if entries else []
        if not is_whole:
            parts.append(f"All other options of {group.title} can be given, too: `falcon-spec {name} {HELP_ALL}`.")
    return "\n\n".join(parts) + "\n"


def _entry(action: Action, note: str, is_whole: bool) -> str:
    """The lines of one option: its name, and below it what it does and its default."""
    value = action.dest.upper()
    if action.choices and is_whole:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if action.const is True:  # a switch
        value = f"or --no_{action.dest}" if action.default is True else ""
    elif action.nargs is not None:
        value = f"[{value}]" if action.nargs == "?" else f"{value} ..."
    name = " ".join([*action.option_strings[:1], value]).strip()
    default = "" if action.default in (None, False, [], "{}") else f"(default: {action.default})"
    default = "(required)" if action.required else default
    text = f"{(action.help or '').replace('%%', '%')} {note or default}" if is_whole else note
    lines = textwrap.wrap(text.strip(), _WIDTH, break_long_words=False)
    return "\n".join([f"  {name}", *(f"      {line}" for line in lines)])


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
    """Keeps options in groups, and reads fields with `positional` in their metadata as positional arguments."""

    foreign: frozenset[str] = frozenset()  # titles of the groups whose options another package declares

    def groups(self) -> Iterator[tuple[Any, bool]]:
        """The groups, and whether another package declares their options; those of ours come first."""
        groups = [(group, group.title in self.foreign) for group in self._action_groups]
        yield from sorted(groups, key=lambda pair: pair[1])

    def _add_dataclass_arguments(self, dtype: DataClassType) -> None:
        """Add a group for each class that declares options, the command's own first; subclasses may redefine them."""
        hints = get_type_hints(dtype)
        classes = [each for each in dtype.__mro__ if "__dataclass_fields__" in vars(each)]
        declared_by = {name: each for each in classes for name in get_annotations(each)}
        for owner in classes:
            is_ours = owner.__module__.startswith(f"{_PACKAGE}.")
            title = vars(owner).get("group") or str(owner.__doc__).strip().split("\n")[0].rstrip(".")
            group = self._group(title if is_ours else f"`{owner.__name__}` of `{owner.__module__.partition('.')[0]}`")
            if not is_ours:
                self.foreign |= {group.title}
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


if __name__ == "__main__":
    sys.exit(main())
