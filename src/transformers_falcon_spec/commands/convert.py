"""`falcon-spec convert`: make a drafter of this package from a checkpoint of other software."""

from ..convert import convert_checkpoint
from ..convert.conversion import read_target
from .options import ConvertCommand


def run(command: ConvertCommand) -> None:
    """Convert the checkpoint."""
    target = None if command.target is None else read_target(command.target, command.gguf_file)
    table = convert_checkpoint(command.source, command.dest, target)
    print(f"{command.dest} holds the drafter of {command.source}, converted from {table.name}.")
