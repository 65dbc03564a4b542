"""`falcon-spec regenerate`: let the target write its own answers to the prompts of a training set."""

from dataclasses import dataclass

from transformers import AutoModelForCausalLM, AutoTokenizer

from ..training.regenerate import RegenerateOptions, regenerate
from .options import DataOptions, option


@dataclass(kw_only=True)
class RegenerateCommand(DataOptions):
    """The target that answers, and the file of the answers."""

    target: str = option("Folder or Hub name of the target.")
    data: list[str] = option("Conversations: .jsonl or .jsonl.gz files, or dataset names.")
    output: str = option("JSON lines file to write; continued if it was begun with the same options.")
    device: str = option("`auto`, or as `device_map` of `from_pretrained` takes it.", "auto")


def run(command: RegenerateCommand, options: RegenerateOptions) -> None:
    """Write the answers, and print how many there are."""
    rows = command.read_conversations().rows
    target = AutoModelForCausalLM.from_pretrained(command.target, dtype="auto", device_map=command.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(command.target)
    num_written = regenerate(target, tokenizer, rows, command.output, options)
    print(f"{num_written} conversations in {command.output}")
