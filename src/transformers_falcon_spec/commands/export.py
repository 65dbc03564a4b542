"""`falcon-spec export`: write an Eagle or DFlash drafter in the form that speculators, vLLM or SGLang reads."""

from ..convert import export_drafter
from .options import ExportCommand


def run(command: ExportCommand) -> None:
    """Export the drafter."""
    export_drafter(command.drafter, command.dest, command.format)
    print(f"{command.dest} holds {command.drafter} in the form of {command.format}.")
