"""Starts `falcon-spec`: shows commands, help and version without loading torch, and hands all else to the package.

It is outside the package because importing that loads torch, which takes seconds.
"""

import importlib
import sys
from importlib.metadata import version
from pathlib import Path

PACKAGE = "transformers_falcon_spec"
HELP = Path(__file__).parent / PACKAGE / "commands" / "help"  # rendered by `tools/help.py`
HELP_ALL = "--help_all"
# Each command is the module of this name in `commands/`, spaces being underscores.
COMMANDS = {
    "generate": "write text, and compare with the target alone",
    "bench": "measure speed and acceptance on prompt files",
    "parity": "check token for token that the text is the target's",
    "calibrate": "fit temperatures that make a drafter's probabilities true",
    "serve": "serve a pair over HTTP, with the endpoints of OpenAI",
    "report": "render results files into documents and pages",
    "regenerate": "let the target answer the prompts of a training set",
    "train": "distil a drafter from a target",
    "trees fit": "find the best static tree of a size for a drafter",
    "trees paper": "write a tree of the paper's shape",
    "trees show": "print a static tree",
    "easyspec tune": "find which layers of an EasySpec drafter attend at once",
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
    name = next((" ".join(argv[:num]) for num in (1, 2) if " ".join(argv[:num]) in COMMANDS), None)
    if name is not None:
        return _run(name, argv[len(name.split()) :])
    if argv[:1] == ["--version"]:
        print(f"falcon-spec {version(PACKAGE)}")
        return 0
    if argv[:1] in (["-h"], ["--help"]):
        print(_usage())
        return 0
    print(_usage(), file=sys.stderr)
    if argv:
        print(f"\nfalcon-spec needs one of these commands, but it got `{' '.join(argv[:2])}`.", file=sys.stderr)
    return 2


def _run(name: str, argv: list[str]) -> int:
    """Run a command, or show its help; returns the exit status."""
    if {"-h", "--help"} & set(argv):
        print((HELP / f"{name.replace(' ', '_')}.txt").read_text(encoding="utf-8"), end="")
        return 0
    return int(importlib.import_module(f"{PACKAGE}.cli").run(name, argv))


def _usage() -> str:
    lines = [f"  {name:15s}{summary}" for name, summary in COMMANDS.items()]
    return (
        "usage: falcon-spec COMMAND [OPTIONS]\n"
        "       falcon-spec --version\n\n" + "\n".join(lines) + "\n\n`falcon-spec COMMAND --help` says more."
    )
