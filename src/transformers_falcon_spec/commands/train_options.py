"""The options of `falcon-spec train` beside those of `TrainingArguments`, and the kinds of drafter that it makes."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from ..drafters import registry as drafters
from ..errors import OptionError
from ..training.objectives import STOCK_METHODS
from ..training.recipes import MEASURED_WIDTH, RECIPES, recipe_help
from .training_data import FORBID_HELP

METHODS: dict[str, Callable[..., PreTrainedModel]] = {
    **{name: stock.make for name, stock in STOCK_METHODS.items()},
    **{name: method.drafter.from_target for name, method in drafters.METHODS.items() if method.objective is not None},
}
DEFAULT_METHOD = "falcon"


@dataclass
class TrainCommand:
    """What to train and on what; all options of `TrainingArguments` can be given too."""

    target: str = field(metadata={"help": "Folder or Hub name of the target."})
    data: list[str] = field(
        metadata={"help": "Conversations: .jsonl or .jsonl.gz files, or dataset names. Best answered by `regenerate`."}
    )
    eval_data: list[str] = field(
        default_factory=list, metadata={"help": "Held-out conversations: evaluation, draft tree."}
    )
    drafter: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of a drafter to train further; a fresh one if left out."}
    )
    method: str | None = field(
        default=None,
        metadata={
            "help": f"Kind of a fresh drafter, {DEFAULT_METHOD} if left out; ar and dflash are for stock `generate`.",
            "choices": sorted(METHODS),
        },
    )
    recipe: str = field(
        default="default",
        metadata={
            "help": "Options that go together; each that is given as well wins over it. The rate of `default` is for a drafter of width "
            f"{MEASURED_WIDTH} and falls with the root of the width. {recipe_help()}",
            "choices": sorted(RECIPES),
        },
    )
    drafter_config: list[str] = field(
        default_factory=list,
        metadata={"help": "Fields of a fresh drafter's config as NAME=VALUE, e.g. `block_size=3 recurrence=token`."},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Stop after so many evaluations without a better `metric_for_best_model`, e.g. acceptance_length."
        },
    )
    max_length: int = field(default=512, metadata={"help": "Longest example in tokens."})
    packing: bool = field(
        default=False,
        metadata={
            "help": "Train on rows of several whole conversations, up to `max_length` tokens; a batch counts rows."
        },
    )
    limit: int | None = field(default=None, metadata={"help": "Read this many conversations only."})
    forbid: list[str] = field(default_factory=list, metadata={"help": FORBID_HELP})
    target_dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    target_device_map: str | None = field(
        default=None,
        metadata={
            "help": "`auto` spreads a target that is too large for one device over all of them and the memory, for one process; a JSON "
            "object names a place for each part. Left out, the target is where the drafter is trained."
        },
    )
    cache_features: str | None = field(
        default=None,
        metadata={"help": "Folder for the target's features: read once, then trained from. Pays from two epochs on."},
    )
    show_masks: int | None = field(
        default=None,
        metadata={
            "help": "Show so many examples with what counts in the loss in colour (5 if no number is given); no training.",
            "nargs": "?",
            "const": 5,
        },
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Say what would be trained and estimate time and memory; no training."}
    )
    save_bf16: bool = field(
        default=False, metadata={"help": "Store weights in bf16 at half the bytes; loads as fp32."}
    )

    @property
    def device_map(self) -> str | dict[str, Any]:
        """Where `from_pretrained` puts the target; from the CPU it follows the drafter.

        Raises:
            [`OptionError`]: an object that is no JSON.
        """
        asked = self.target_device_map or "cpu"
        try:
            return json.loads(asked) if asked.startswith("{") else asked
        except json.JSONDecodeError as error:
            raise OptionError(
                f'`--target_device_map` takes `auto` or a JSON object such as \'{{"": "cuda:1"}}\', but got `{asked}`: {error}.'
            ) from error

    @property
    def sources(self) -> dict[str, list[str]]:
        """Where conversations come from, by what they are for."""
        return {"train": self.data, **({"eval": self.eval_data} if self.eval_data else {})}


def config_fields(entries: list[str]) -> dict[str, Any]:
    """Fields of a config from `NAME=VALUE`; a value is JSON (`3`, `true`, `[0, -1]`) where it can be read so, else a string.

    Raises:
        [`OptionError`]: an entry without `=`.
    """
    found = {}
    for entry in entries:
        name, is_given, value = entry.partition("=")
        if not is_given:
            raise OptionError(f"`--drafter_config` takes NAME=VALUE, such as `block_size=3`, but got `{entry}`.")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
