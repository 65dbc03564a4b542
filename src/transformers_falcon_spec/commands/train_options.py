"""The options of `falcon-spec train` in addition to `TrainingArguments`, and the drafter that they ask for."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..drafters import registry as drafters
from ..errors import OptionError
from ..training.dataset import ConversationDataset
from ..training.lora import LoraOptions, with_lora
from ..training.recipes import MEASURED_WIDTH, RECIPES, Recipe, make_drafter, makers, recipe_of
from .loading import load_trainable
from .options import DTYPE_HELP, DataOptions, option

DEFAULT_METHOD = "falcon"
_OWN_METHOD = " For a drafter of your own name the module that registers it: `--import MODULE`."


@dataclass(kw_only=True)
class TrainCommand(DataOptions):
    """The drafter to train, and the data; all options of `TrainingArguments` can be given, too."""

    target: str = option("Folder or Hub name of the target.")
    eval_data: list[str] = option(
        "Held-out conversations for the evaluation and the draft tree; without them one in twenty of `--data`.", []
    )
    drafter: str | None = option("Folder or Hub name of a drafter to train further; a fresh one if left out.", None)
    method: str | None = option(
        f"Kind of a fresh drafter, {DEFAULT_METHOD} if left out.",
        None,
    )
    recipe: str = option(
        "Options that go together; given ones win over the recipe. The rate of `default` is for a drafter of "
        f"width {MEASURED_WIDTH} and falls with the root of the width.",
        "default",
        choices=sorted(RECIPES),
    )
    drafter_config: list[str] = option(
        "Fields of a fresh drafter's config as NAME=VALUE, e.g. `block_size=3 recurrence=token`.", []
    )
    early_stopping_patience: int | None = option(
        "Stop after so many evaluations without a better `metric_for_best_model`, e.g. acceptance_length.", None
    )
    target_dtype: str = option(DTYPE_HELP, "auto")
    target_device_map: str | None = option(
        "`auto` spreads a target that is too large for one device over all of them and the memory, for one process; a "
        "JSON object names a device for each part. Without it the target is on the drafter's device.",
        None,
    )
    cache_features: str | None = option(
        "Folder for the target's features: read once, then trained from. Pays from two epochs on.", None
    )
    show_masks: int | None = option(
        "Show so many examples with what counts in the loss in brackets (5 if no number is given); no training.",
        None,
        nargs="?",
        const=5,
    )
    dry_run: bool = option("Print the plan, with what it takes of memory and disk; no training.", False)
    save_bf16: bool = option("Store weights in bf16 at half the bytes; loads as fp32.", False)

    @property
    def device_map(self) -> str | dict[str, Any]:
        """The `device_map` for the target; from the CPU it is later moved to the drafter's device."""
        device_map = self.target_device_map or "cpu"
        try:
            return json.loads(device_map) if device_map.startswith("{") else device_map
        except json.JSONDecodeError as error:
            raise OptionError(
                f'`--target_device_map` takes `auto` or a JSON object such as \'{{"": "cuda:1"}}\', but got '
                f"`{device_map}`: {error}."
            ) from error

    @property
    def default_folder(self) -> str:
        """Where the drafter is saved unless `--output_dir` says it: a folder named after the target and the kind."""
        kind = self.method or DEFAULT_METHOD if self.drafter is None else f"{Path(self.drafter).name}-trained"
        return f"{Path(self.target).name}-{kind}"

    @property
    def sources(self) -> dict[str, list[str]]:
        """The sources of conversations, for training and for evaluation, as the record names them."""
        return {"train": self.data, **({"eval": self.eval_data} if self.eval_data else {})}


def config_fields(entries: list[str]) -> dict[str, Any]:
    """Parse config fields from `NAME=VALUE`; a value that is no JSON (`3`, `true`, `[0, -1]`) is a string."""
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


def check_drafter_options(command: TrainCommand, lora: LoraOptions) -> None:
    """Check, before anything is loaded, that the options for drafter, method, recipe and adapter go together."""
    if command.drafter is None:
        method = command.method or DEFAULT_METHOD
        if method not in makers():
            raise OptionError(f"`--method` must be one of {sorted(makers())}, but it is {method!r}.{_OWN_METHOD}")
        recipe_of(command.recipe, method)
        if lora.use_peft:
            raise OptionError(
                "`--use_peft` needs `--drafter`: an adapter is trained on a drafter that is there. Name it, or train "
                "a fresh one without `--use_peft`."
            )
    elif command.method is not None or command.drafter_config:
        raise OptionError(
            "`--drafter` names a drafter that says itself what it is, so `--method` and `--drafter_config` must be "
            "left out."
        )


def drafter_to_train(
    command: TrainCommand, lora: LoraOptions, target: PreTrainedModel, data: ConversationDataset
) -> tuple[PreTrainedModel, Recipe]:
    """Make a fresh drafter, or load an existing one, with a new adapter if asked; returns its recipe, too."""
    if command.drafter is None:
        recipe = recipe_of(command.recipe, command.method or DEFAULT_METHOD)
        fields = {**recipe.drafter_config, **config_fields(command.drafter_config)}
        drafter = make_drafter(command.method or DEFAULT_METHOD, target, data, **fields)
    else:
        drafter = load_trainable(command.drafter, target)
        method = drafters.method_of(drafter)
        name = method.name if method else type(drafter).__name__
        recipe = replace(recipe_of(command.recipe, name), drafter_config={})
    if lora.use_peft:
        drafter = with_lora(drafter, lora)  # type: ignore[assignment]  # it forwards
    return drafter, recipe
