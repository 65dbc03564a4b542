"""Options that several commands share, each with its help and its check in one place."""

import json
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import OptionError
from ..evaluation.prompts import Prompt, read_prompts
from ..provenance import provenance
from ..training.conversations import ConversationSet, read_conversations
from ..training.overlap import Forbidden, OverlapIndex, refuse_overlaps
from .loading import load_target

TREE_HELP = (
    "JSON file, as `trees fit` and `trees paper` write it, of a static tree to draft instead of the drafter's own "
    "trees."
)
DTYPE_HELP = "auto, float32, bfloat16 or float16."


def option(text: str, default: Any = MISSING, **metadata: Any) -> Any:
    """A field of a command's options: its help, its default, without which it must be given, and more for argparse."""
    defaults = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(metadata={"help": text, **metadata}, **defaults)


@dataclass(kw_only=True)
class ModelOptions:
    """Type and device of the models."""

    group: ClassVar[str] = "models"
    dtype: str = option(DTYPE_HELP, "float32")
    device: str = option("cpu, cuda, or auto to spread over devices.", "cpu")


@dataclass(kw_only=True)
class TargetOptions(ModelOptions):
    """A target."""

    group: ClassVar[str] = "models"
    target: str = option("Folder or Hub name of the target.")

    def load_target(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The target and its tokenizer."""
        return load_target(self.target, self.dtype, self.device)

    def origin(self, target: PreTrainedModel, **settings: Any) -> dict[str, Any]:
        """The provenance of a result: all options of the command, and the type in which the target computed."""
        dtype = str(target.dtype).removeprefix("torch.")
        return provenance(**{**vars(self), "dtype": dtype, **settings})


@dataclass(kw_only=True)
class PairOptions(TargetOptions):
    """A target and a drafter."""

    group: ClassVar[str] = "models"
    drafter: str = option("Folder or Hub name of the drafter.")

    def check_folder(self) -> None:
        """Refuse a drafter whose config cannot be written to."""
        if not (Path(self.drafter) / "config.json").is_file():
            raise OptionError(
                "This writes into the drafter's config.json, so `drafter` must be a folder that holds one, but it is "
                f"`{self.drafter}`. Download it; an adapter is merged and saved first."
            )


@dataclass(kw_only=True)
class TextOptions:
    """Prompts, and how much is written after them."""

    group: ClassVar[str] = "prompts and texts"
    prompts: list[str] = option("JSON lines files of prompts; each is a set named after its file.")
    limit: int | None = option("Use this many prompts of each file only.", None)
    max_new_tokens: int = option("Most tokens of a text.", 128)

    def read_prompts(self, use: str = "answer") -> list[Prompt]:
        """The prompts, which are there for this `use`."""
        prompts = read_prompts(self.prompts, self.limit)
        if not prompts:
            raise OptionError(f"There must be a prompt to {use}, but {self.prompts} hold none within `limit`.")
        return prompts


@dataclass(kw_only=True)
class ResultOptions:
    """A results file; what was measured so far lies beside it."""

    group: ClassVar[str] = "results"
    output: str = option(
        "JSON file to write; what was measured goes to the same name with .jsonl, where a later run goes on."
    )

    def __post_init__(self) -> None:
        """Other files are named after this one."""
        json_file(self.output)

    @property
    def records_file(self) -> Path:
        """Where single measurements go."""
        return Path(self.output).with_suffix(".jsonl")

    def write(self, result: dict[str, Any]) -> None:
        """Write the results."""
        Path(self.output).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@dataclass(kw_only=True)
class DataOptions:
    """Conversations, and what they must not hold."""

    group: ClassVar[str] = "conversations"
    data: list[str] = option(
        "Conversations: .jsonl or .jsonl.gz files, or dataset names. Best answered by `regenerate`."
    )
    limit: int | None = option("Read this many conversations only.", None)
    forbid: list[str] = option(
        "Prompt files, as `bench` takes them, that the data must not hold: rows that share a run of words are "
        "refused.",
        [],
    )

    def read_conversations(self, sources: list[str] | None = None) -> ConversationSet:
        """The conversations of `sources`, else of `data`; system turns of the `forbid` files are free to be shared."""
        index = OverlapIndex(  # first: a file that is missing is told before the data is read
            Forbidden(content, prompt.origin)
            for prompt in read_prompts(self.forbid)
            for role, content in prompt.messages
            if role != "system"
        )
        data = read_conversations(self.data if sources is None else sources, self.limit)
        if self.forbid:
            refuse_overlaps(data, index)
        return data


def json_file(name: str) -> Path:
    """The path of a results file."""
    if Path(name).suffix != ".json":
        raise OptionError(f"`output` must end in `.json`, but it is `{name}`; other files are named after it.")
    return Path(name)


def check_least(command: Any, **least: int) -> None:
    """Refuse a number below the least that its option takes."""
    for name, number in least.items():
        if getattr(command, name) < number:
            raise OptionError(f"`{name}` must be at least {number}, but it is {getattr(command, name)}.")
