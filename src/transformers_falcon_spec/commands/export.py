"""`falcon-spec export`: write an Eagle drafter in the form that speculators, vLLM or SGLang reads.

DEST gets a config.json and a model.safetensors that these load with code of their own. docs/serving.md has the command
lines of the engines, and what is lost there.

Example, on a drafter that `train` wrote:
  falcon-spec export my-drafter my-drafter-vllm --format vllm
"""

from dataclasses import dataclass

from ..convert import export_drafter
from ..convert.export import ExportFormat
from .options import option


@dataclass(kw_only=True)
class ExportCommand:
    """The drafter to export, and the folder and the form to write."""

    drafter: str = option("Folder or Hub id of an Eagle drafter.", positional=True)
    dest: str = option("Folder to write; new or empty.", positional=True)
    format: ExportFormat = option("Whose form is written: speculators, vllm or sglang.")


def run(command: ExportCommand) -> None:
    """Export the drafter."""
    export_drafter(command.drafter, command.dest, command.format)
    print(f"{command.dest} holds {command.drafter} in the form of {command.format}.")
