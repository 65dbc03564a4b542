"""Options that several commands share, with their help and their checks."""

import json
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn
from transformers import MuseGlimmerAssistantConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.checkpoint import kind_of
from ..drafters.registry import drafter_classes
from ..errors import OptionError
from ..evaluation.prompts import Prompt, read_prompts
from ..provenance import provenance, weights_fingerprint
from ..training.chat_template import ask_for_switch
from ..training.conversations import ConversationSet, read_conversations
from .loading import load_target

DTYPE_HELP = "float32, bfloat16 or float16; auto is the type that the target was saved in."


def option(text: str, default: Any = MISSING, **metadata: Any) -> Any:
    """Declare an option with its help text; without a default it is required. `metadata` goes to argparse."""
    defaults = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(metadata={"help": text, **metadata}, **defaults)


@dataclass(kw_only=True)
class TemplateOptions:
    """The arguments for the target's chat template."""

    group: ClassVar[str] = "chat template"
    chat_template_kwargs: str = option(
        "JSON object of arguments for the target's chat template, such as '{\"enable_thinking\": false}'.", "{}"
    )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The arguments for the chat template."""
        try:
            found = json.loads(self.chat_template_kwargs)
        except json.JSONDecodeError as error:
            found = error
        if not isinstance(found, dict):
            raise OptionError(
                "`--chat_template_kwargs` must be a JSON object such as '{\"enable_thinking\": false}', but it is "
                f"{self.chat_template_kwargs!r}{f': {found}' if isinstance(found, Exception) else ''}."
            )
        return found

    def check_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the chat template knows the arguments, and log that a switch for thinking was not given."""
        ask_for_switch(tokenizer, self.template_kwargs)


@dataclass(kw_only=True)
class TargetOptions:
    """The target, its dtype and its device."""

    group: ClassVar[str] = "models"
    target: str = option("Folder or Hub name of the target.")
    dtype: str = option(DTYPE_HELP, "auto")
    device: str = option(
        "cpu, cuda or cuda:N; auto is the best there is, and several if one does not hold the target.", "auto"
    )

    def load_target(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the target and its tokenizer, and check arguments for the chat template."""
        target, tokenizer = load_target(self.target, self.dtype, self.device)
        if isinstance(self, TemplateOptions):
            self.check_template(tokenizer)
        return target, tokenizer

    def origin(self, target: PreTrainedModel, **settings: Any) -> dict[str, Any]:
        """Return the provenance of a result: all options of the command, and the dtype of the target."""
        dtype = str(target.dtype).removeprefix("torch.")
        return provenance(**{**vars(self), "dtype": dtype, **settings})


@dataclass(kw_only=True)
class PairOptions(TargetOptions):
    """The target and the drafter."""

    group: ClassVar[str] = "models"
    drafter: str = option("Folder or Hub name of the drafter.")

    def check_folder(self) -> None:
        """Check that the drafter is a folder with a config that can be changed."""
        if not (Path(self.drafter) / "config.json").is_file():
            raise OptionError(
                "This writes into the drafter's config.json, so `drafter` must be a folder that holds one, but it is "
                f"`{self.drafter}`. Download it; an adapter is merged and saved first."
            )
        if kind_of(self.drafter) not in (*drafter_classes(), MuseGlimmerAssistantConfig.model_type):
            raise OptionError(
                f"This writes into the drafter's config.json, but `{self.drafter}` is a checkpoint of other software, "
                "and what stands there would not be read. Convert it, and name `DEST`: `falcon-spec convert "
                f"{self.drafter} DEST --target TARGET`."
            )

    def settings(self, target: PreTrainedModel, drafter: nn.Module, *names: str, **others: Any) -> dict[str, Any]:
        """Return what all measurements of a file must share: both fingerprints, the options `names`, and `others`."""
        given = {name: getattr(self, name) for name in names}
        if "dtype" in given:  # what `auto` came to
            given["dtype"] = str(target.dtype).removeprefix("torch.")
        if isinstance(self, TemplateOptions) and self.template_kwargs:
            given["template_kwargs"] = self.template_kwargs
        weights = {"target": weights_fingerprint(target), "drafter": weights_fingerprint(drafter)}
        return {**weights, **given, **others}


@dataclass(kw_only=True)
class DraftingOptions:
    """How drafters of this package draft, and from which seed texts are drawn."""

    group: ClassVar[str] = "drafting"
    draft_tree: str | None = option(
        "JSON file, as `trees` writes it, of a static tree to draft instead of the drafter's own trees, or `paper`, "
        "the tree that the Falcon paper shows.",
        None,
    )
    step: Literal["auto", "dynamic", "static"] | None = option(
        "How steps are decoded. static: in tensors of fixed shape, which a GPU captures once and replays; a call that "
        "cannot be decoded so is an error that says why, as `falcon-spec doctor` does. dynamic: in tensors that grow "
        "with the text. auto: static on CUDA where the call allows it. None leaves it to the drafter's own options.",
        None,
    )
    seed: int = option("Seed of the sampling.", 0)


@dataclass(kw_only=True)
class TextOptions(TemplateOptions):
    """The prompts, and the length of the texts."""

    group: ClassVar[str] = "prompts and texts"
    prompts: list[str] = option("JSON lines files of prompts; each is a set named after its file.")
    limit: int | None = option("Use this many prompts of each file only.", None)
    max_new_tokens: int = option("Most tokens of a text.", 128)

    def read_prompts(self, use: str = "answer") -> list[Prompt]:
        """Read the prompts; if there are none, the error says that one is needed for `use`."""
        prompts = read_prompts(self.prompts, self.limit, self.template_kwargs)
        if not prompts:
            raise OptionError(f"There must be a prompt to {use}, but {self.prompts} hold none within `limit`.")
        return prompts


@dataclass(kw_only=True)
class ResultOptions:
    """The results file; single measurements are in a second file of the same name."""

    group: ClassVar[str] = "results"
    output: str = option(
        "JSON file to write; single measurements go to the same name with .jsonl, from which a later run continues."
    )

    def __post_init__(self) -> None:
        """Check the name of the results file, from which other names are made."""
        if Path(self.output).suffix != ".json":
            raise OptionError(
                f"`output` must end in `.json`, but it is `{self.output}`; other files are named after it."
            )

    @property
    def records_file(self) -> Path:
        """The file of single measurements, from which an interrupted run continues."""
        return Path(self.output).with_suffix(".jsonl")

    def write(self, result: dict[str, Any]) -> None:
        """Write the results to the JSON file."""
        Path(self.output).write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@dataclass(kw_only=True)
class DataOptions(TemplateOptions):
    """The conversations."""

    group: ClassVar[str] = "conversations"
    needs_answers: ClassVar[bool] = True
    data: list[str] = option(
        "Conversations, best answered by `regenerate`: files, folders, or data sets of the Hub as NAME, NAME:SPLIT or "
        "NAME:CONFIGURATION:SPLIT."
    )
    limit: int | None = option("Read this many conversations only.", None)

    def read_conversations(self, sources: list[str] | None = None) -> ConversationSet:
        """Read the conversations of `sources`, by default of `data`."""
        return read_conversations(self.data if sources is None else sources, self.limit, self.needs_answers)


def check_least(command: Any, **least: int) -> None:
    """Check that options are not below their least values, given by name."""
    for name, number in least.items():
        if getattr(command, name) < number:
            raise OptionError(f"`{name}` must be at least {number}, but it is {getattr(command, name)}.")
