"""Making the drafter that `falcon-spec train` trains: a fresh one, an existing one, or an adapter of that."""

from dataclasses import replace

from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

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


def check_packing(command: TrainCommand, drafter: PreTrainedModel) -> None:
    """Check, before features are read, that the drafter can learn from packed rows."""
    bare = unwrap_peft_model(drafter)
    if command.packing and not objective_of(bare).reads_packed:
        raise OptionError(
            "`--packing` needs a drafter that learns from rows of several conversations, but a "
            f"`{type(bare).__name__}` does not. Leave out `--packing`."
        )


def drafter_to_train(
    command: TrainCommand, lora: LoraOptions, target: PreTrainedModel, data: ConversationDataset
) -> PreTrainedModel:
    """Make a fresh drafter, or load an existing one, with a new adapter if asked."""
    if command.drafter is None:
        return fresh_drafter(command, target, data)
    drafter = load_trainable(command.drafter)
    return with_lora(drafter, lora) if lora.use_peft else drafter  # type: ignore[return-value]  # it forwards


def fresh_drafter(command: TrainCommand, target: PreTrainedModel, data: ConversationDataset) -> PreTrainedModel:
    """Make an untrained drafter; a draft vocabulary gets the tokens that the assistant says most often in `data`."""
    method = command.method or DEFAULT_METHOD
    fields = {**recipe_of(command.recipe, method).drafter_config, **config_fields(command.drafter_config)}
    drafter = METHODS[method](target, **fields)
    if isinstance(drafter, EagleDrafter) and drafter.config.has_own_vocabulary:
        config = drafter.config
        drafter.set_draft_vocabulary(most_frequent_tokens(data.examples, config.vocab_size, config.num_draft_tokens))
    return drafter


def recipe_for(command: TrainCommand, drafter: PreTrainedModel) -> Recipe:
    """Return the recipe of this run, without config fields if the drafter exists already."""
    if command.drafter is None:
        return recipe_of(command.recipe, command.method or DEFAULT_METHOD)
    bare = unwrap_peft_model(drafter)
    method = method_of(bare)
    return replace(recipe_of(command.recipe, method.name if method else type(bare).__name__), drafter_config={})
