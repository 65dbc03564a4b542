"""What a `DrafterTrainer` is given, made ready: its arguments, data, drafter and metrics."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from ..drafters.config_fields import context_of
from ..drafters.eagle import EagleDrafter
from ..drafters.registry import METHODS
from ..errors import OptionError, TrainingError
from .arguments import DrafterTrainingArguments
from .chat_template import ask_for_switch
from .conversations import read_conversations
from .dataset import most_frequent_tokens
from .objectives import STOCK_METHODS
from .recipes import recipe_of
from .row_encoding import Example
from .top_k_accuracy import accuracy_metrics

Metrics = Callable[[EvalPrediction], dict[str, float]]
MASKS = ("assistant_mask", "assistant_masks")  # as Transformers calls it, too

DRAFTERS: dict[str, Callable[..., PreTrainedModel]] = {  # makers of fresh ones, by method
    **{name: stock.make for name, stock in STOCK_METHODS.items()},
    **{name: method.drafter.from_target for name, method in METHODS.items() if method.objective is not None},
}


def make_drafter(method: str, target: PreTrainedModel, data: Any, **fields: Any) -> PreTrainedModel:
    """An untrained drafter of a method; one with a vocabulary of its own gets what the assistant says in `data`."""
    if method not in DRAFTERS:
        raise OptionError(f"`model` must be a drafter, or one of {sorted(DRAFTERS)}, but it is {method!r}.")
    drafter = DRAFTERS[method](target, **fields)
    if isinstance(drafter, EagleDrafter) and drafter.config.has_own_vocabulary:
        sizes = drafter.config.vocab_size, drafter.config.num_draftable_tokens
        drafter.set_draft_vocabulary(most_frequent_tokens(_examples(data), *sizes))
    return drafter


def checked_arguments(args: TrainingArguments | None, target: PreTrainedModel) -> DrafterTrainingArguments:
    """The arguments, by default those of the class, with a `max_length` within the target's context."""
    if args is not None and not isinstance(args, DrafterTrainingArguments):
        raise OptionError(
            "`args` must be `DrafterTrainingArguments`, which take every option of `TrainingArguments` and have the "
            f"defaults that drafters need, but they are `{type(args).__name__}`: make them of the same options."
        )
    args = args or DrafterTrainingArguments()
    args.max_length = min(args.max_length, context_of(target.config) or args.max_length)
    return args


def drafter_of(
    model: PreTrainedModel | str, target: PreTrainedModel, data: Any, args: DrafterTrainingArguments | None
) -> PreTrainedModel:
    """The drafter; of a method's name a fresh one by its default recipe, whose options go into `args`, if any."""
    if not isinstance(model, str):
        return model
    recipe = recipe_of("default", model)
    drafter = make_drafter(model, target, data, **recipe.drafter_config)
    if args is not None:
        recipe.apply(args, (), getattr(drafter.config.get_text_config(), "hidden_size", None))
    return drafter


def all_prepared(
    data: Mapping[str, Any], tokenizer: Any, max_length: int, template_kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """`train_dataset` and `eval_dataset` of the trainer's arguments, each [`prepared`]; the first is one data set."""
    if isinstance(given := data.get("train_dataset"), Mapping):
        raise TrainingError(
            f"`train_dataset` must be one data set, but it holds several: {sorted(given)}. Take one of them: "
            '`load_dataset(..., split="train")`.'
        )
    names = ("train_dataset", "eval_dataset")
    return {name: prepared(data.get(name), tokenizer, max_length, template_kwargs) for name in names}


def prepared(data: Any, tokenizer: Any, max_length: int, template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Data as the trainer reads it: conversations become token ids and masks, tokenised rows stay as they are.

    Raises:
        [`TrainingError`]: rows are neither, or conversations come without a tokenizer.
    """
    if data is None or isinstance(data, str) or hasattr(data, "conversations"):  # a string names one of several
        return data
    if isinstance(data, Mapping):
        return {name: prepared(part, tokenizer, max_length, template_kwargs) for name, part in data.items()}
    columns = _columns(data)
    if "messages" in columns:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TrainingError(
                "`processing_class` must be the target's tokenizer where the data are conversations, but it is "
                f"{tokenizer!r}. Pass `processing_class=AutoTokenizer.from_pretrained(TARGET)`."
            )
        ask_for_switch(tokenizer, template_kwargs or {})
        return read_conversations([data]).encoded(tokenizer, max_length, template_kwargs)
    mask = next((name for name in MASKS if name in columns), None)
    if mask is None or "input_ids" not in columns:
        raise TrainingError(
            "Rows of the data must be conversations under `messages`, or have `input_ids` and an `assistant_mask` of "
            f"the tokens that the assistant says, but they have {sorted(columns)}. Tokenise with "
            "`apply_chat_template(..., return_assistant_tokens_mask=True, return_dict=True)`, or keep `messages`."
        )
    return data if mask == MASKS[0] else data.rename_column(mask, MASKS[0])


def _columns(data: Any) -> set[str]:
    names = getattr(data, "column_names", None)
    if not hasattr(data, "__len__"):
        raise TrainingError(
            "Data must have a length, for batches hold rows of similar lengths, but they are a "
            f"`{type(data).__name__}`. Take a part of a stream: `Dataset.from_list(list(stream.take(10_000)))`."
        )
    return set(names) if names is not None else set(data[0]) if len(data) else set()


def _examples(data: Any) -> list[Example]:
    if data is None:
        raise TrainingError("`train_dataset` must be given, for the drafter's vocabulary is that of its answers.")
    rows = data.conversations if hasattr(data, "conversations") else data
    return [rows[index] for index in range(len(rows))]


def merged_metrics(given: Metrics | None) -> Metrics:
    """The accuracies of a drafter, and the metrics of a `compute_metrics` that reads the same prediction."""
    if given is None:
        return accuracy_metrics

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        ours, theirs = accuracy_metrics(prediction), given(prediction)
        if both := sorted(ours.keys() & theirs.keys()):
            raise OptionError(
                f"`compute_metrics` must give metrics of other names than the trainer's own, but it gives {both}."
            )
        return {**ours, **theirs}

    return compute
