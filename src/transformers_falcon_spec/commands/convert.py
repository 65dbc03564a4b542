"""`falcon-spec convert`: make a drafter of this package from a checkpoint of other software.

Falcon, Eagle, Eagle-3, DFlash, speculators and Medusa checkpoints, and diffusion models such as Dream, are recognised
by their config and weights. DEST is then loaded like any drafter. docs/convert.md lists the formats.

Example, on a folder with `config.json` and weights of Eagle-3:
  falcon-spec convert downloads/eagle3 my-drafter --target downloads/its-target
"""

from dataclasses import dataclass

from ..convert import convert_checkpoint
from .options import option


@dataclass(kw_only=True)
class ConvertCommand:
    """The checkpoint to convert, and the folder of the drafter."""

    source: str = option("Folder or Hub id of the checkpoint.", positional=True)
    dest: str = option("Folder to write; new or empty.", positional=True)
    target: str | None = option(
        "Folder or Hub id of the target, for facts that the checkpoint lacks, and to tell copies of its weights.", None
    )


def run(command: ConvertCommand) -> None:
    """Convert the checkpoint."""
    table = convert_checkpoint(command.source, command.dest, command.target)
    print(f"{command.dest} holds the drafter of {command.source}, converted from {table.name}.")
