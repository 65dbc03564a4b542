"""`falcon-spec`: one command line for training, generating and measuring. Parses, then hands over to `commands/`."""

import importlib
import logging
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import Field, dataclass
from typing import Any

from transformers.hf_argparser import DataClassType, HfArgumentParser

from .errors import FalconSpecError


@dataclass(frozen=True)
class Command:
    """Where a command lives and the dataclasses that hold its options, as `module:class`.

    `asks_what_is_given` hands the names of the options on the command line over as well.
    """

    module: str
    options: tuple[str, ...]
    summary: str
    asks_what_is_given: bool = False


COMMANDS = {
    "generate": Command(
        "generate", ("commands.generate:GenerateCommand",), "write text, and compare with the target alone"
    ),
    "bench": Command("bench", ("commands.bench:BenchCommand",), "measure speed and acceptance on prompt files"),
    "parity": Command(
        "parity", ("commands.parity:ParityCommand",), "check token for token that the text is the target's"
    ),
    "calibrate": Command(
        "calibrate", ("commands.calibrate:CalibrateCommand",), "fit how far a drafter's chances may be trusted"
    ),
    "report": Command("report", ("commands.report:ReportCommand",), "render results files into the README"),
    "regenerate": Command(
        "regenerate",
        ("commands.regenerate:RegenerateCommand", "training.regenerate:RegenerateOptions"),
        "let the target answer the prompts of a training set",
    ),
    "train": Command(
        "train",
        (
            "commands.train_options:TrainCommand",
            "training.arguments:DrafterTrainingArguments",
            "training.adapters:LoraOptions",
        ),
        "distil a drafter from a target",
        asks_what_is_given=True,
    ),
    "trees fit": Command(
        "fit_tree", ("commands.fit_tree:FitTreeCommand",), "find the best static tree of a size for a drafter"
    ),
    "trees paper": Command(
        "paper_tree", ("commands.paper_tree:PaperTreeCommand",), "write a tree of the paper's shape"
    ),
    "trees show": Command("show_tree", ("commands.show_tree:ShowTreeCommand",), "print a static tree"),
    "easyspec tune": Command(
        "tune_groups",
        ("commands.tune_groups:TuneGroupsCommand",),
        "find which layers of an EasySpec drafter attend at once",
    ),
    "convert": Command(
        "convert", ("commands.convert:ConvertCommand",), "make a drafter from a checkpoint of other software"
    ),
    "contract": Command(
        "contract", ("commands.contract:ContractCommand",), "write into a drafter which target it is for"
    ),
    "find": Command("find", ("commands.find:FindCommand",), "list published drafters for a target"),
    "doctor": Command(
        "doctor", ("commands.doctor:DoctorCommand",), "say why drafts are not kept, or why it is not faster"
    ),
    "publish": Command(
        "publish", ("commands.publish:PublishCommand",), "put a drafter on the Hub, with card and recipe"
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    name = next((" ".join(argv[:num]) for num in (1, 2) if " ".join(argv[:num]) in COMMANDS), None)
    if name is None:
        print(_usage())
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    command = COMMANDS[name]
    module = importlib.import_module(f".commands.{command.module}", __package__)
    parser = _Parser(
        [_load(name) for name in command.options],
        prog=f"falcon-spec {name}",
        description=module.__doc__,
        formatter_class=_Help,
    )
    try:
        *options, unknown = parser.parse_args_into_dataclasses(
            argv[len(name.split()) :], return_remaining_strings=True
        )
        if unknown:
            parser.error(f"unknown arguments: {' '.join(unknown)}")
        given = [parser.given(argv[len(name.split()) :])] if command.asks_what_is_given else []
        module.run(*options, *given)
    except (FalconSpecError, OSError) as error:  # files, the disk and the network tell what is wrong in words
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


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


def _usage() -> str:
    lines = [f"  {name:15s}{command.summary}" for name, command in COMMANDS.items()]
    return (
        "usage: falcon-spec COMMAND [OPTIONS]\n\n" + "\n".join(lines) + "\n\n`falcon-spec COMMAND --help` tells more."
    )


def _load(name: str) -> DataClassType:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), attribute)


if __name__ == "__main__":
    sys.exit(main())
