"""`falcon-spec`: finds the command, parses its options, runs its module, and prints help and errors."""

import importlib
import logging
import sys
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum
from importlib.metadata import version
from inspect import cleandoc, get_annotations
from io import TextIOWrapper
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .commands import options
from .core.options import ALLOWED, check_options
from .errors import FalconSpecError, OptionError, naming_extras

_PACKAGE = __package__.partition(".")[0]
_SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
HELP_ALL = "--help_all"
IMPORT = "--import"
IMPORT_HELP = (
    "Module to import first, from here or from what is installed: it registers a drafter or a verifier of your own; "
    "docs/extending.md shows both. Give the option again for another module."
)
# The options of training that are not declared with the commands; those of Transformers are the last.
_OF_TRAINING = {
    "train": ["training.options:LoraOptions", "training.arguments:DrafterTrainingArguments"],
    "regenerate": ["training.options:RegenerateOptions"],
}
_OF_HELP = {**_OF_TRAINING, "train": ["training.options:LoraOptions", "training.options:DrafterTrainingOptions"]}
_TRAINER = "`TrainingArguments` of `transformers`"
# Each command is the module of this name in `commands/`, whose function `run` does the work.
COMMANDS = {
    "generate": "write text, and compare with the target alone",
    "bench": "measure speed and acceptance on prompt files",
    "parity": "check token for token that the text is the target's",
    "calibrate": "fit temperatures that make a drafter's probabilities true",
    "serve": "serve a pair over HTTP, with the endpoints of OpenAI",
    "regenerate": "let the target answer the prompts of a training set",
    "train": "distil a drafter from a target",
    "trees": "find the best static tree of a size for a drafter",
    "convert": "make a drafter from a checkpoint of other software",
    "export": "write an Eagle or DFlash drafter as speculators, vLLM or SGLang reads it",
    "find": "list published drafters for a target",
    "doctor": "find out why drafts are rejected, or why it is not faster",
    "publish": "put a drafter on the Hub, with its card",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return run(argv[0], argv[1:])

    if argv[:1] == ["--version"]:
        print(f"falcon-spec {version(_PACKAGE)}")
        return 0

    usage = "usage: falcon-spec COMMAND [OPTIONS]\n       falcon-spec --version\n\n"
    for name, summary in COMMANDS.items():
        usage += f"  {name:15s}{summary}\n"

    usage += "\n`falcon-spec COMMAND --help` says more."
    if argv[:1] in (["-h"], ["--help"]):
        print(usage)
        return 0

    print(usage, file=sys.stderr)
    if argv:
        print(f"\nfalcon-spec needs one of these commands, but it got `{argv[0]}`.", file=sys.stderr)

    return 2


def run(name: str, argv: list[str]) -> int:
    """Run the command of this name with the options `argv`, or show its help; returns the exit status."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a pipe or a console may lack signs of a text

    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)  # not a line for every request to the Hub or a server

    try:
        with naming_extras():
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
    program = f"falcon-spec {name}"
    if {"-h", "--help", HELP_ALL} & set(argv):
        parser = Parser(options_of(name, is_whole=HELP_ALL in argv), program)
        print(parser.full_help(options.TRAIN_NOTES if name == "train" else {}), end="")
        return 0

    parser = Parser(options_of(name), program)
    found = parser.parsed(argv)
    importlib.import_module(".generation.patch", _PACKAGE).enable()
    importlib.import_module(".drafters.registry", _PACKAGE)
    if name not in _OF_TRAINING:  # what Transformers warns of does not stand between texts and figures
        importlib.import_module("transformers.utils.logging").set_verbosity_error()

    given = [parser.given(argv)] if name == "train" else []
    importlib.import_module(f".commands.{name}", __package__).run(*found, *given)
    return 0


def options_of(name: str, is_whole: bool = True) -> list[type]:
    """The dataclasses of a command's options, its own first; `is_whole`: with those of Transformers."""
    own: type = getattr(options, f"{name.title()}Command")
    others = _OF_TRAINING if is_whole else _OF_HELP
    return [own, *(resolve_name(f"{_PACKAGE}.{path}") for path in others.get(name, []))]


class _HelpFormatter(RawDescriptionHelpFormatter):
    """Shows each option by one spelling, and a switch by its two names."""

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if action.const is True:
            return f"--{action.dest}" + (f" or --no_{action.dest}" if action.default is True else "")

        return f"{action.option_strings[0]} {self._format_args(action, action.dest.upper())}"


class Parser(ArgumentParser):
    """Reads dataclasses of options; fields with `positional` in their metadata are positional arguments.

    Args:
        kinds (`Sequence[type]`): The dataclasses. The docstring of the first one is the help.
        program (`str`): The command, as users write it.
    """

    def __init__(self, kinds: Sequence[type], program: str) -> None:
        super().__init__(usage=f"{program} [OPTIONS]", add_help=False, formatter_class=_HelpFormatter)
        self._kinds = kinds
        self._program = program
        for kind in kinds:
            self._add_options(kind)

    def full_help(self, notes: dict[str, str]) -> str:
        """The help: what the command does, and its options in groups, each with its default or what `notes` say of it.

        Of the options of `TrainingArguments`, where they are not added, those are shown that have a note.
        """
        text = cleandoc(str(self._kinds[0].__doc__))
        self.description = f"{self._program}: {text.partition(': ')[2].strip()}"
        known = {action.dest for action in self._actions}
        others = [name for name in notes if name not in known]
        if others:
            all_others = f"All others of {_TRAINER} can be given, too: `{self._program} {HELP_ALL}`."
            group = self.add_argument_group(_TRAINER, all_others)
            for name in others:
                group.add_argument(f"--{name}")

        self.add_argument_group("code of your own").add_argument(IMPORT, dest="module", help=IMPORT_HELP)
        for action in self._actions:
            note = notes.get(action.dest, "").replace("%", "%%")
            if action.const is False:  # `--no_NAME` stands beside `--NAME`
                action.help = SUPPRESS
            else:
                action.help = f"{action.help or ''} {note or _default_of(action)}"

        return self.format_help()

    def parsed(self, argv: Sequence[str] | None) -> list[Any]:
        """The options on the command line, an instance of each dataclass; what is unknown ends the program."""
        found = vars(self.parse_args(argv))
        instances = []
        for kind in self._kinds:
            given = {}
            for each in fields(kind):
                if each.init:
                    given[each.name] = found[each.name]

            try:
                instance = kind(**given)
            except ValueError as error:  # of `TrainingArguments`, in words for users
                raise OptionError(str(error)) from error

            check_options(instance)
            instances.append(instance)

        return instances

    def given(self, argv: list[str]) -> frozenset[str]:
        """Return the names of the options that `argv` gives, even if a value equals the default."""
        unset = object()
        namespace = Namespace()
        for action in self._actions:
            setattr(namespace, action.dest, unset)

        self.parse_known_args(argv, namespace)
        return frozenset(name for name, value in vars(namespace).items() if value is not unset)

    def _add_options(self, kind: type) -> None:
        """Add a group for each class that declares options, the command's own first; subclasses may redefine them."""
        hints = get_type_hints(kind)
        left = {each.name: each for each in fields(kind) if each.init}
        for owner in kind.__mro__:
            own = [left.pop(name) for name in get_annotations(owner) if name in left]
            if not own:
                continue

            title = str(owner.__doc__).strip().split("\n")[0].rstrip(".")
            if owner is self._kinds[0]:
                title = "options of its own"
            elif owner.__module__.startswith("transformers."):
                title = _TRAINER

            group = self.add_argument_group(title)
            for each in own:
                _add_option(group, each, hints[each.name])


def _add_option(group: Any, field: "Field[Any]", hint: Any) -> None:
    """Add the option of one field, whose type is `hint`, to a group of a parser."""
    settings = dict(field.metadata)
    settings.pop(ALLOWED, None)
    if settings.pop("positional", False):
        group.add_argument(field.name, type=str, metavar=field.name.upper(), **settings)
        return

    default = field.default if field.default_factory is MISSING else field.default_factory()
    names = list(dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"]))
    kind, may_be_none = _kind_of(hint)
    if kind is bool:
        settings["type"] = _switch
        if not (may_be_none and default is None):
            settings |= {"nargs": "?", "const": True}
    elif isinstance(kind, type) and issubclass(kind, Enum):
        settings["choices"] = [each.value for each in kind]
    elif get_origin(kind) is Literal:
        settings["choices"] = list(get_args(kind))
    elif get_origin(kind) is list:
        settings |= {"type": get_args(kind)[0], "nargs": "+"}
    else:
        settings["type"] = kind

    is_required = default is MISSING
    group.add_argument(*names, default=None if is_required else default, required=is_required, **settings)
    if kind is bool and default is True:
        others = [f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"]
        group.add_argument(*dict.fromkeys(others), action="store_false", dest=field.name, default=True)


def _kind_of(hint: Any) -> tuple[Any, bool]:
    """What one value of an option is, and whether it may be None; of several kinds the narrowest, else a text."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False

    kinds: list[Any] = [each for each in get_args(hint) if each is not NoneType]
    for kind in kinds:
        if kind is bool or (isinstance(kind, type) and issubclass(kind, Enum)):
            return kind, NoneType in get_args(hint)

    return str if str in kinds else kinds[0], NoneType in get_args(hint)


def _switch(text: str) -> bool:
    """The value of a switch that is written out."""
    if text.lower() not in _SWITCH:
        raise ArgumentTypeError(f"must be true or false, but it is {text!r}")

    return _SWITCH[text.lower()]


def _default_of(action: Action) -> str:
    """What runs without an option, in brackets; nothing where it is nothing."""
    if action.required:
        return "(required)"

    is_nothing = action.default in ([], "{}") or action.default is None or action.default is False
    return "" if is_nothing else f"(default: {action.default})".replace("%", "%%")


if __name__ == "__main__":
    sys.exit(main())
