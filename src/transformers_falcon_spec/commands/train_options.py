"""The options of `falcon-spec train` in addition to `TrainingArguments`, and the drafter that they ask for."""

import json
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from ..drafters import registry as drafters
from ..errors import OptionError
from ..training.dataset import ConversationDataset
from ..training.lora import with_lora
from ..training.options import LoraOptions
from ..training.recipes import Recipe, make_drafter, makers, recipe_of
from .loading import load_trainable
from .options import DEFAULT_METHOD, TrainCommand

_OWN_METHOD = " For a drafter of your own name the module that registers it: `--import MODULE`."


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
