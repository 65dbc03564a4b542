"""`falcon-spec`: finds the command, parses its options, runs its module, and prints help and errors."""

import importlib
import logging
import sys
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import Field, fields, is_dataclass
from importlib.metadata import version
from inspect import get_annotations
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from transformers.hf_argparser import DataClassType, HfArgumentParser

from .errors import FalconSpecError, OptionError

_PACKAGE = __package__.partition(".")[0]
HELP_ALL = "--help_all"
IMPORT = "--import"
IMPORT_HELP = (
    "Module to import first, from here or from what is installed: it registers a drafter or a verifier of your own; "
    "docs/extending.md shows both. Give the option again for another module."
)
# Each command is the module of this name in `commands/`.
COMMANDS = {
    "generate": "write text, and compare with the target alone",
    "bench": "measure speed and acceptance on prompt files",
    "parity": "check token for token that the text is the target's",
    "calibrate": "fit temperatures that make a drafter's probabilities true",
    "serve": "serve a pair over HTTP, with the endpoints of OpenAI",
    "regenerate": "let the target answer the prompts of a training set",
    "train": "distil a drafter from a target",
    "trees": "find the best static tree of a size for a drafter, or print a tree",
    "convert": "make a drafter from a checkpoint of other software",
    "export": "write an Eagle drafter as speculators, vLLM or SGLang reads it",
    "fingerprint": "record in a drafter which target it was trained for",
    "find": "list published drafters for a target",
    "doctor": "find out why drafts are rejected, or why it is not faster",
    "publish": "put a drafter on the Hub, with its card and code",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return run(argv[0], argv[1:])

    if argv[:1] == ["--version"]:
        print(f"falcon-spec {version(_PACKAGE)}")
        return 0

    lines = [f"  {name:15s}{summary}" for name, summary in COMMANDS.items()]
    usage = "usage: falcon-spec COMMAND [OPTIONS]\n       falcon-spec --version\n\n" + "\n".join(lines)
    usage += "\n\n`falcon-spec COMMAND --help` says more."
    if argv[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0

    print(usage, file=sys.stderr)
    if argv:
        print(f"\nfalcon-spec needs one of these commands, but it got `{argv[0]}`.", file=sys.stderr)
    return 2


def run(name: str, argv: list[str]) -> int:
    """Run the command of this name with the options `argv`, or show its help; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # not a line for every request to the Hub or a server
    try:
        return _run(name, _without_imports(argv))
    except (FalconSpecError, OSError) as error:  # errors of files and the network have messages for users, too
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _without_imports(argv: list[str]) -> list[str]:
    """Import the modules that `--import` names, and return the other arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(IMPORT, action="append", default=[], dest="modules")
    found, others = parser.parse_known_args(argv)
    if found.modules:
        sys.path.insert(0, str(Path.cwd()))  # an installed script is not looked for beside the files of its user

    for module in found.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise OptionError(
                f"`{IMPORT}` must name a module that Python finds in this folder or among what is installed, but it "
                f"is {module!r}. Leave out `.py`, and give dots for folders."
            ) from error
    return others


def _run(name: str, argv: list[str]) -> int:
    module = module_of(name)
    parser = _Parser(options_of(name), name)
    if {"-h", "--help", HELP_ALL} & set(argv):
        notes = module.help_notes() if hasattr(module, "help_notes") else {}
        print(parser.full_help(str(module.__doc__), notes, with_foreign=HELP_ALL in argv), end="")
        return 0

    *options, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if unknown:
        parser.error(f"unknown arguments: {' '.join(unknown)}")
    given = [parser.given(argv)] if "given" in get_type_hints(module.run) else []
    module.run(*options, *given)
    return 0


def module_of(name: str) -> ModuleType:
    """Import the module of a command: its docstring is the help, its function `run` does the work."""
    return importlib.import_module(f".commands.{name}", __package__)


def options_of(name: str) -> list[DataClassType]:
    """Return the dataclasses of a command's options, which are the annotations of its function `run`.

    If `run` has an argument `given`, it receives the names of the options on the command line there.
    """
    hints = get_type_hints(module_of(name).run)
    return [DataClassType(hint) for hint in hints.values() if is_dataclass(hint)]


class _HelpFormatter(RawDescriptionHelpFormatter):
    """Shows each option by one spelling, and a switch by its two names."""

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if action.const is True:
            return f"--{action.dest}" + (f" or --no_{action.dest}" if action.default is True else "")
        return f"{action.option_strings[0]} {self._format_args(action, action.dest.upper())}"


class _Parser(HfArgumentParser):
    """Keeps options in groups, and reads fields with `positional` in their metadata as positional arguments."""

    def __init__(self, options: list[DataClassType], command: str) -> None:
        self._command = command
        self.foreign: set[str] = set()  # titles of the groups whose options another package declares
        usage = f"falcon-spec {command} [OPTIONS]"
        super().__init__(options, usage=usage, add_help=False, formatter_class=_HelpFormatter)

    def full_help(self, text: str, notes: dict[str, str], with_foreign: bool = False) -> str:
        """The help: `text`, and the options in groups, each with the default that runs or what `notes` say of it.

        Options that another package declares, such as those of `TrainingArguments`, are left out unless they are in
        `notes`, or `with_foreign` asks for all.
        """
        self.description = f"falcon-spec {self._command}: {text.partition(': ')[2].strip()}"
        self._action_groups.sort(key=lambda group: group.title in self.foreign)
        self.add_argument_group("code of your own").add_argument(IMPORT, dest="module", help=IMPORT_HELP)
        for group in self._action_groups:
            is_cut = group.title in self.foreign and not with_foreign
            if is_cut:
                group.description = (
                    f"All others of {group.title} can be given, too: `falcon-spec {self._command} {HELP_ALL}`."
                )
            for action in group._group_actions:
                note = notes.get(action.dest, "").replace("%", "%%")
                if action.const is False or (is_cut and not note):  # `--no_NAME` stands beside `--NAME`
                    action.help = SUPPRESS
                elif is_cut:
                    action.help, action.choices = note, None
                else:
                    action.help = f"{action.help or ''} {note or _default_of(action)}"
        return self.format_help()

    def given(self, argv: list[str]) -> frozenset[str]:
        """Return the names of the options that `argv` gives, even if a value equals the default."""
        unset = object()
        namespace = Namespace(**dict.fromkeys((action.dest for action in self._actions), unset))
        self.parse_known_args(argv, namespace)
        return frozenset(name for name, value in vars(namespace).items() if value is not unset)

    def _add_dataclass_arguments(self, dtype: DataClassType) -> None:
        """Add a group for each class that declares options, the command's own first; subclasses may redefine them."""
        hints = get_type_hints(dtype)
        classes = [each for each in dtype.__mro__ if "__dataclass_fields__" in vars(each)]
        declared_by = {name: each for each in classes for name in get_annotations(each)}
        for owner in classes:
            if owner.__module__.startswith(f"{_PACKAGE}."):
                title = vars(owner).get("group") or str(owner.__doc__).strip().split("\n")[0].rstrip(".")
            else:
                title = f"`{owner.__name__}` of `{owner.__module__.partition('.')[0]}`"
                self.foreign.add(title)
            known = [group for group in self._action_groups if group.title == title]
            group: Any = known[0] if known else self.add_argument_group(title)
            for each in fields(dtype):
                if each.init and declared_by[each.name] is owner:
                    each.type = hints[each.name]
                    self._parse_dataclass_field(group, each)

    @staticmethod
    def _parse_dataclass_field(parser: ArgumentParser, field: "Field[Any]") -> None:
        if field.metadata.get("positional"):
            parser.add_argument(field.name, type=field.type, help=field.metadata["help"], metavar=field.name.upper())
        else:
            HfArgumentParser._parse_dataclass_field(parser, field)


def _default_of(action: Action) -> str:
    """What runs without an option, in brackets; nothing where it is nothing."""
    if action.required:
        return "(required)"
    is_nothing = action.default in ([], "{}") or action.default is None or action.default is False
    return "" if is_nothing else f"(default: {action.default})".replace("%", "%%")


if __name__ == "__main__":
    sys.exit(main())
