"""`falcon-spec convert`: make a drafter of this package from a checkpoint of other software.

Falcon, Eagle, Eagle-3, speculators and Medusa checkpoints are told by their config and weights; DEST is then loaded like any drafter.
docs/convert.md lists what is read.

Example, on a folder with `config.json` and weights of Eagle-3:
  falcon-spec convert downloads/eagle3 my-drafter --target downloads/its-target
"""

from dataclasses import dataclass, field

from ..convert import convert_checkpoint


@dataclass
class ConvertCommand:
    """What to convert, and where to."""

    source: str = field(metadata={"positional": True, "help": "Folder or Hub id of the checkpoint."})
    dest: str = field(metadata={"positional": True, "help": "Folder to write; new or empty."})
    target: str | None = field(
        default=None,
        metadata={"help": "Folder or Hub id of the target; for what the checkpoint does not say. Its config is read."},
    )


def run(command: ConvertCommand) -> None:
    """Convert."""
    kind = convert_checkpoint(command.source, command.dest, command.target)
    print(f"{command.dest} holds the drafter of {command.source}, converted from {kind.value}.")
