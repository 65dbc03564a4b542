"""`falcon-spec regenerate`: let the target write its own answers to the prompts of a training set."""

from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, AutoTokenizer

from ..training.regenerate import RegenerateOptions, regenerate
from .training_data import FORBID_HELP, read_training_data


@dataclass
class RegenerateCommand:
    """What to answer and where to write it."""

    target: str = field(metadata={"help": "Folder or Hub name of the target."})
    data: list[str] = field(metadata={"help": "Conversations: .jsonl or .jsonl.gz files, or dataset names."})
    output: str = field(
        metadata={"help": "JSON lines file to write; continued if it was begun with the same options."}
    )
    limit: int | None = field(default=None, metadata={"help": "Answer this many conversations only."})
    forbid: list[str] = field(default_factory=list, metadata={"help": FORBID_HELP})
    device: str = field(default="auto", metadata={"help": "`auto`, or as `device_map` of `from_pretrained` takes it."})


def run(command: RegenerateCommand, options: RegenerateOptions) -> None:
    """Answer and report."""
    rows = read_training_data(command.data, command.limit, command.forbid).rows
    target = AutoModelForCausalLM.from_pretrained(command.target, dtype="auto", device_map=command.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(command.target)
    num_written = regenerate(target, tokenizer, rows, command.output, options)
    print(f"{num_written} conversations in {command.output}")
