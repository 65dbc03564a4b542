"""Making the drafter that `falcon-spec train` trains: a fresh one, an existing one, or an adapter of that."""

from dataclasses import replace

from transformers import PreTrainedModel

from ..drafters.eagle import EagleDrafter
from ..drafters.registry import method_of
from ..errors import OptionError
from ..training.dataset import ConversationDataset
from ..training.draft_vocabulary import most_frequent_tokens
from ..training.lora import LoraOptions, with_lora
from ..training.objectives import objective_of
from ..training.recipes import Recipe, recipe_of
from .loading import load_trainable
from .train_options import DEFAULT_METHOD, METHODS, TrainCommand, config_fields


def check_drafter_options(command: TrainCommand, lora: LoraOptions) -> None:
    """Check, before anything is loaded, that the options for drafter, method, recipe and adapter go together."""
    if command.drafter is None:
        recipe_of(command.recipe, command.method or DEFAULT_METHOD)
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
        drafter = METHODS[command.method or DEFAULT_METHOD](target, **fields)
        if isinstance(drafter, EagleDrafter) and drafter.config.has_own_vocabulary:
            sizes = drafter.config.vocab_size, drafter.config.num_draft_tokens
            drafter.set_draft_vocabulary(most_frequent_tokens(data.examples, *sizes))
    else:
        drafter = load_trainable(command.drafter)
        method = method_of(drafter)
        name = method.name if method else type(drafter).__name__
        recipe = replace(recipe_of(command.recipe, name), drafter_config={})
    if command.packing and not objective_of(drafter).reads_packed:
        raise OptionError(
            "`--packing` needs a drafter that learns from rows of several conversations, but a "
            f"`{type(drafter).__name__}` does not. Leave out `--packing`."
        )
    if lora.use_peft:
        drafter = with_lora(drafter, lora)  # type: ignore[assignment]  # it forwards
    return drafter, recipe
