"""`falcon-spec convert`: make a drafter of this package from a checkpoint of other software."""

from ..convert import convert_checkpoint
from .options import ConvertCommand


def run(command: ConvertCommand) -> None:
    """Convert the checkpoint."""
    table = convert_checkpoint(command.source, command.dest, command.target)
    print(f"{command.dest} holds the drafter of {command.source}, converted from {table.name}.")
