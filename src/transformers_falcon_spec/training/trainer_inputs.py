"""What a `DrafterTrainer` is given, made ready: its arguments, data, drafter and metrics."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from ..drafters.config_fields import context_of
from ..drafters.eagle import EagleDrafter
from ..drafters.registry import methods
from ..errors import OptionError, TrainingError
from .arguments import DrafterTrainingArguments
from .chat_template import ask_for_switch
from .conversations import CONVERSATIONS, QUESTIONS, plain_rows, read_conversations
from .dataset import ConversationDataset, most_frequent_tokens
from .objectives import STOCK_METHODS
from .recipes import recipe_of
from .top_k_accuracy import accuracy_metrics

logger = logging.getLogger(__name__)

Metrics = Callable[[EvalPrediction], dict[str, float]]
MASKS = ("assistant_mask", "assistant_masks", "labels")  # ours, that of `apply_chat_template`, that of other trainers


def makers() -> dict[str, Callable[..., PreTrainedModel]]:
    """By the name of each method that can be trained, what makes a fresh drafter for a target."""
    found: dict[str, Callable[..., PreTrainedModel]] = {}
    for name, stock in STOCK_METHODS.items():
        found[name] = stock.make
    for name, method in methods().items():
        if method.objective is not None:
            found[name] = method.drafter.from_target
    return found


def make_drafter(method: str, target: PreTrainedModel, data: Any, **fields: Any) -> PreTrainedModel:
    """An untrained drafter of a method; one with a vocabulary of its own gets what the assistant says in `data`."""
    known = makers()
    if method not in known:
        raise OptionError(f"`model` must be a drafter, or one of {sorted(known)}, but it is {method!r}.")

    drafter = known[method](target, **fields)
    if isinstance(drafter, EagleDrafter) and drafter.config.has_own_vocabulary:
        if data is None:
            raise TrainingError("`train_dataset` must be given, for the drafter's vocabulary is that of its answers.")
        rows = getattr(data, "conversations", data)
        examples = (rows[index] for index in range(len(rows)))
        sizes = drafter.config.vocab_size, drafter.config.num_draftable_tokens
        drafter.set_draft_vocabulary(most_frequent_tokens(examples, *sizes))
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
    given: dict[str, Any] = {}
    for name in ("train_dataset", "eval_dataset"):
        part = data.get(name)
        given[name] = [part] if isinstance(part, str) else part

    train = given["train_dataset"]
    if _is_several(train):
        if len(train) > 1:
            raise TrainingError(
                f"`train_dataset` must be one data set, but it holds several: {sorted(train)}. Take one of them: "
                '`load_dataset(..., split="train")`.'
            )
        given["train_dataset"] = next(iter(train.values()))
    return {name: prepared(part, tokenizer, max_length, template_kwargs) for name, part in given.items()}


def prepared(data: Any, tokenizer: Any, max_length: int, template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Data as the trainer reads it: conversations in any form and tokenised rows become examples.

    Raises:
        [`TrainingError`]: the data have no length or no rows, none can be used, or conversations come without a
            tokenizer.
    """
    if isinstance(data, Path):
        data = [data]
    if data is None or isinstance(data, str) or hasattr(data, "conversations"):  # a string names one of several
        return data
    if _is_several(data):
        return {name: prepared(part, tokenizer, max_length, template_kwargs) for name, part in data.items()}

    columns = _columns(data)
    mask = next((name for name in MASKS if name in columns), None)
    if "input_ids" in columns and mask is not None:
        if mask == "labels":
            logger.info("What counts is taken from `labels`: all tokens but those of -100.")
        return ConversationDataset.of_token_ids(plain_rows(data), max_length, mask)
    if "input_ids" in columns and not columns & set(CONVERSATIONS):
        raise TrainingError(
            "Rows with `input_ids` must say what the assistant says, as an `assistant_mask` or as `labels` that are "
            f"-100 elsewhere, but they have {sorted(columns)}. Tokenise with `apply_chat_template(..., "
            "return_assistant_tokens_mask=True, return_dict=True)`, or keep `messages`."
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TrainingError(
            "`processing_class` must be the target's tokenizer where the data are conversations, but it is "
            f"`{type(tokenizer).__name__}`. Pass `processing_class=AutoTokenizer.from_pretrained(TARGET)`."
        )
    ask_for_switch(tokenizer, template_kwargs or {})
    return read_conversations(data).encoded(tokenizer, max_length, template_kwargs)


def _is_several(data: Any) -> bool:
    """Whether data are several data sets by name, and not the columns of one."""
    known = {*CONVERSATIONS, *QUESTIONS, "input_ids", "text"}
    return isinstance(data, Mapping) and not known & set(data)


def _columns(data: Any) -> set[str]:
    """The names of the columns; none of a list of files or of bare conversations."""
    if not hasattr(data, "__len__"):
        raise TrainingError(
            "Data must have a length, for batches hold rows of similar lengths, but they are a "
            f"`{type(data).__name__}`. Take a part of a stream: `Dataset.from_list(list(stream.take(10_000)))`."
        )
    if not len(data):
        raise TrainingError("Data must have a row at least, but they are empty. Give conversations or tokenised rows.")
    names = getattr(data, "column_names", getattr(data, "columns", None))  # of `datasets` and Arrow; of pandas, polars
    if names is None:
        first = data if isinstance(data, Mapping) else data[0]
        names = first.keys() if isinstance(first, Mapping) else ()
    return set(map(str, names))


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
