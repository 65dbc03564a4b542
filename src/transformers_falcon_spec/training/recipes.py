"""What a run does where the user does not say it: recipes by method, fresh drafters, and a plan by target and data.

Recipes are named sets of training options and fields of the drafter's config; methods without one use the defaults of
[`DrafterTrainingArguments`] and of their config. The plan is what follows from target, data and device, each option
with its reason. Options that are given win over both.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, SchedulerType

from ..drafters.base import DrafterModel
from ..drafters.config_fields import context_of
from ..drafters.draft_vocabulary import DraftVocabulary
from ..drafters.falcon import paper_tree
from ..drafters.registry import METHODS
from ..errors import OptionError, TrainingError, quoted
from .arguments import DrafterTrainingArguments
from .chat_template import ChatTemplate, Message
from .dataset import count_said, example_lengths, most_frequent, usual_length
from .objectives import STOCK_METHODS, Objective

MEASURED_WIDTH = 256  # width of the drafters with which the default recipe was found


@dataclass(frozen=True)
class Recipe:
    """A set of training options, fields of the drafter's config and options of its drafts that go together.

    If `measured_width` is given, the learning rate is that of a drafter of this width; it falls with the root of the
    width.
    """

    training: Mapping[str, Any] = field(default_factory=dict)
    drafter_config: Mapping[str, Any] = field(default_factory=dict)
    drafts: Mapping[str, Any] = field(default_factory=dict)  # of `drafter.generation_config`
    measured_width: int | None = None

    def apply(self, args: DrafterTrainingArguments, given: Collection[str], width: int | None) -> None:
        """Write the options for a drafter of this width into `args`, except those that the user has `given`."""
        settings = dict(self.training)
        if self.measured_width is not None and width is not None:
            settings["learning_rate"] *= (self.measured_width / width) ** 0.5
        for name, value in settings.items():
            if name not in given:
                setattr(args, name, value)


# Loss weights, learning rate and architecture were found by the experiments in `lab/log/falcon.md`, on a target of
# width 256, in runs of up to 8,000 steps, 200 of them warm-up. That the rate falls with the
# root of the width is common practice and was not measured here.
_MEASURED = Recipe(
    training={
        "learning_rate": 2e-3,
        "warmup_steps": 0.025,
        "lr_scheduler_type": SchedulerType.COSINE,
        "feature_loss_weight": 0.1,
        "token_loss_weight": 1.0,
        "use_glancing": False,
    },
    drafter_config={
        "block_size": 3,
        "recurrence": "token",
        "num_recurrent_layers": 1,
        "norm_inputs": True,
        "shortcut": True,
        "newest_row": True,
        "attention_bias": False,
        "transition_rank": 64,
    },
    drafts={"dynamic_tree": True, "prompt_lookup_num_tokens": 10},
    measured_width=MEASURED_WIDTH,
)
# arXiv 2412.12639: section 3, and figures 2 (two attention blocks) and 6 (the tree). The paper's rate of 3e-5 is for
# 800,000 steps; this one suits runs of thousands of steps.
_PAPER = Recipe(
    training={
        "learning_rate": 5e-4,
        "warmup_steps": 0,
        "lr_scheduler_type": SchedulerType.LINEAR,
        "feature_loss_weight": 1.0,
        "token_loss_weight": 0.1,
        "use_glancing": True,
        "glancing_ratio": 0.4,
        "draft_tree_nodes": 0,  # the tree is given below
    },
    drafter_config={
        "block_size": 2,
        "num_hidden_layers": 2,
        "recurrence": "sequence",
        "block_position_embedding": False,
        "shortcut": False,
        "newest_row": False,
        "draft_tree": paper_tree().to_json(),
    },
)
RECIPES: dict[str, dict[str, Recipe]] = {"default": {"falcon": _MEASURED}, "paper": {"falcon": _PAPER}}
_OTHERS = Recipe(drafts={"prompt_lookup_num_tokens": 10})  # all methods that the default has no recipe for


def recipe_of(name: str, method: str) -> Recipe:
    """The recipe of this name for a method; where the default has none for it, one that trains by the usual defaults.

    Raises:
        [`OptionError`]: there is no recipe of this name, or it is not for this method.

    Example:

    ```python
    >>> recipe_of("paper", "falcon").drafter_config["recurrence"], recipe_of("default", "medusa").training
    ('sequence', {})

    ```
    """
    if name not in RECIPES:
        raise OptionError(f"`recipe` must be one of {sorted(RECIPES)}, but it is {name!r}.")
    if method not in RECIPES[name] and name != "default":
        raise OptionError(
            f"The recipe `{name}` is one for {quoted(RECIPES[name])}, but the method is "
            f"`{method}`. Leave `--recipe` out."
        )

    return RECIPES[name].get(method, _OTHERS)


# Fresh drafters


def makers() -> dict[str, Callable[..., PreTrainedModel]]:
    """By the name of each method that can be trained, what makes a fresh drafter for a target."""
    found: dict[str, Callable[..., PreTrainedModel]] = {}
    for name, stock in STOCK_METHODS.items():
        found[name] = stock.make
    for name, method in METHODS.items():
        if method.objective is not None:
            found[name] = method.drafter.from_target
    return found


# Sizes of a short list of tokens, and the share of what the assistant says that it should hold. Both are chosen, not
# measured; `lab/log/smollm2.md` has what lists of these sizes hold of one target's answers.
LIST_SIZES = (4096, 8192, 16384)
LIST_SHARE = 0.95
AUTO = "auto"  # as many as hold that share


def make_drafter(
    method: str, target: PreTrainedModel, data: Any, recipe: Recipe | None = None, **fields: Any
) -> PreTrainedModel:
    """An untrained drafter of a method for a target and its answers in `data`, by a recipe and the `fields` given.

    It drafts as the recipe says, with a branch of repeated text where its kind has one. A target with more tokens than
    the largest of [`LIST_SIZES`] gets a drafter of those that the assistant says most often: as many as
    `draft_vocab_size` says, or as it takes to hold [`LIST_SHARE`] of the answers.
    """
    known = makers()
    if method not in known:
        raise OptionError(
            f"`method` must be one of {sorted(known)}, but it is {method!r}. For one of your own name the module "
            "that registers it, with an `objective`: `--import MODULE`."
        )

    recipe = recipe or recipe_of("default", method)
    drafter = _made(method, known[method], target, data, {**recipe.drafter_config, **fields})
    if isinstance(drafter, DrafterModel):
        for name, value in recipe.drafts.items():
            if name != "prompt_lookup_num_tokens" or drafter.can_repeat_text:
                setattr(drafter.generation_config, name, value)

    return drafter


def _made(
    method: str, make: Callable[..., Any], target: PreTrainedModel, data: Any, fields: dict[str, Any]
) -> PreTrainedModel:
    """A fresh drafter, with the short list of tokens that its kind and the answers ask for."""
    own = METHODS.get(method)
    if own is None or own.objective is None or not issubclass(own.drafter, DraftVocabulary):
        return make(target, **fields)

    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    if data is not None and vocab_size > max(LIST_SIZES):
        fields.setdefault("draft_vocab_size", AUTO)
    wanted = fields.get("draft_vocab_size")
    if wanted is None:
        return make(target, **fields)
    if data is None:
        raise TrainingError("`train_dataset` must be given, for the drafter's vocabulary is that of its answers.")

    counts = said_in(data, vocab_size)
    num_tokens = _list_size(counts) if wanted == AUTO else wanted
    drafter: Any = make(target, **{**fields, "draft_vocab_size": num_tokens})
    drafter.set_draft_vocabulary(most_frequent(counts, num_tokens))
    return drafter


def said_in(data: Any, vocab_size: int) -> Tensor:
    """How often the assistant says each token in training data; cached features are not read."""
    rows = getattr(data, "conversations", data)
    return count_said((rows[index] for index in range(len(rows))), vocab_size)


def _list_size(counts: Tensor) -> int:
    """The smallest size of a list that holds the share of what was counted; the largest where none does."""
    shares = counts.sort(descending=True).values.cumsum(0) / counts.sum().clamp(min=1)
    for size in LIST_SIZES:
        if shares[size - 1] >= LIST_SHARE:
            return size
    return max(LIST_SIZES)


# The plan

# As most drafters of `lab/log/falcon.md` were trained: 8 conversations a step, 8,000 steps at most.
ROWS_PER_STEP = 8
MOST_STEPS = 8_000
MOST_EPOCHS = 8
MOST_HELD_OUT = 64  # conversations
HELD_OUT_SHARE = 20  # one in so many
NUM_SAMPLED = 200  # rows whose lengths are looked at
LENGTH_STEP = 512  # tokens
LOGITS_COPIES = 6  # of a guess's logits in float32, for them and their loss; 5.2 measured (`lab/log/training.md`)
_GIVEN = "as asked for"


@dataclass(frozen=True)
class Choice:
    """One line of the plan: what was chosen, and why."""

    what: str
    value: str
    reason: str


@dataclass(frozen=True)
class Device:
    """What a plan asks of the device: its kind, the memory that is free, and whether it computes in bfloat16."""

    kind: str
    free_bytes: int | None = None  # None where nothing is known
    has_bfloat16: bool = False

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """The facts of a device."""
        if device.type != "cuda":
            return cls(device.type)
        return cls("cuda", torch.cuda.mem_get_info(device)[0], torch.cuda.is_bf16_supported())


def held_out_rows(num_rows: int) -> list[int]:
    """The rows that are held out of the training where no other data are given for evaluation, evenly spaced.

    Example:

    ```python
    >>> held_out_rows(19), held_out_rows(60)
    ([], [10, 30, 50])

    ```
    """
    count = min(MOST_HELD_OUT, num_rows // HELD_OUT_SHARE)
    return [(2 * number + 1) * num_rows // (2 * count) for number in range(count)]


def plan_length(
    args: DrafterTrainingArguments,
    given: Collection[str],
    rows: Sequence[list[Message]],
    template: ChatTemplate,
    config: PreTrainedConfig,
) -> Choice:
    """Write the greatest length of an example into `args` unless it was `given`, by a sample of the `rows`."""
    context = context_of(config) or math.inf
    if "max_length" in given:
        reason = _GIVEN if args.max_length <= context else "the target's context, which is shorter"
        args.max_length = int(min(args.max_length, context))
    else:
        lengths = example_lengths(rows[:: math.ceil(len(rows) / NUM_SAMPLED)], template)
        fitting = max(math.ceil(usual_length(lengths) / LENGTH_STEP), 1) * LENGTH_STEP
        args.max_length = int(min(fitting, context))
        num_whole = sum(length <= args.max_length for length in lengths)
        reason = f"{num_whole} of a sample of {len(lengths)} examples are whole"

    return Choice("length", f"{args.max_length} tokens", reason)


def plan_run(objective: Objective, given: Collection[str], lengths: Sequence[int], device: Device) -> list[Choice]:
    """Write into the objective's arguments what the user has not `given`; returns the plan.

    `lengths` are those of the rows, in tokens.
    """
    args = objective.args
    bytes_free = None
    if device.free_bytes is not None:
        bytes_free = device.free_bytes - _bytes_to_come(objective.features.target, device)

    batch = _plan_batch(args, given, bytes_of_row(objective, max(lengths)), bytes_free)
    steps = _plan_steps(args, given, len(lengths))
    if "logging_steps" not in given:
        args.logging_steps = min(max(_num_steps(args, len(lengths)) // 20, 1), 100)
    if "dataloader_pin_memory" not in given:
        args.dataloader_pin_memory = device.kind != "cpu"  # it is for copies to a device
    return [_plan_precision(args, given, device), batch, steps, _plan_checkpoints(args, given)]


def bytes_of_row(objective: Objective, length: int) -> int:
    """About what a row of so many tokens takes while the drafter learns from it.

    For each guess that is the copies of its logits, and what goes into linear layers and comes out of them.
    """
    layers = [each for each in objective.drafter.modules() if isinstance(each, nn.Linear)]
    num_between = sum(layer.in_features + layer.out_features for layer in layers)
    numbers_per_guess = LOGITS_COPIES * objective.num_draftable_tokens + num_between
    return 4 * objective.most_guesses(length) * numbers_per_guess


def _bytes_to_come(target: Any, device: Device) -> int:
    """Bytes of the target that are not on the device yet."""
    return sum(weight.nbytes for weight in target.parameters() if weight.device.type != device.kind)


def _plan_checkpoints(args: DrafterTrainingArguments, given: Collection[str]) -> Choice:
    if {"save_strategy", "save_steps", "save_total_limit"} & set(given):
        limit = "all" if args.save_total_limit is None else f"{args.save_total_limit} at most"
        return Choice("checkpoints", "none" if args.save_strategy == "no" else limit, _GIVEN)
    args.save_total_limit = 1
    return Choice("checkpoints", "the newest", "to go on from after a break; each is three times the drafter")


def _plan_precision(args: DrafterTrainingArguments, given: Collection[str], device: Device) -> Choice:
    if {"bf16", "fp16"} & set(given):
        name = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
        return Choice("precision", name, _GIVEN)
    if device.kind == "cuda" and device.has_bfloat16:
        args.bf16 = True
        args.mixed_precision = "bf16"
        return Choice("precision", "bfloat16", "this GPU computes in it; the drafter's weights stay in float32")

    where = "this GPU has no bfloat16" if device.kind == "cuda" else f"what {device.kind} computes best"
    return Choice("precision", "float32", where)


def _plan_batch(
    args: DrafterTrainingArguments, given: Collection[str], row_bytes: int, bytes_free: int | None
) -> Choice:
    """The rows that one process reads at a time, and how many times before a step."""
    reason = _GIVEN
    if "per_device_train_batch_size" not in given:
        rows = max(ROWS_PER_STEP // (args.world_size * args.gradient_accumulation_steps), 1)
        fitting = rows if bytes_free is None else max(bytes_free // 2 // row_bytes, 1)
        args.per_device_train_batch_size = 2 ** int(math.log2(min(rows, fitting)))
        reason = f"{ROWS_PER_STEP} a step, as in the recipe's experiments"
        if bytes_free is not None:
            reason += (
                f"; a row takes about {row_bytes / 1e9:.1f} GB, and half of {bytes_free / 1e9:.1f} GB are for rows"
            )

        if "gradient_accumulation_steps" not in given:
            args.gradient_accumulation_steps = math.ceil(rows / args.per_device_train_batch_size)
        if "per_device_eval_batch_size" not in given:
            args.per_device_eval_batch_size = args.per_device_train_batch_size

    times = f", {args.gradient_accumulation_steps} times a step" if args.gradient_accumulation_steps > 1 else ""
    return Choice("batch", f"{args.per_device_train_batch_size} rows{times}", reason)


def _plan_steps(args: DrafterTrainingArguments, given: Collection[str], num_rows: int) -> Choice:
    per_epoch = _steps_per_epoch(args, num_rows)
    reason = _GIVEN
    if not {"max_steps", "num_train_epochs"} & set(given):
        args.max_steps = min(per_epoch * MOST_EPOCHS, max(MOST_STEPS, per_epoch))
        reason = f"up to {MOST_EPOCHS} epochs and {MOST_STEPS} steps, as the drafter in `models/`; at least an epoch"
    steps = _num_steps(args, num_rows)
    return Choice("steps", f"{steps}, {steps / per_epoch:.1f} epochs", reason)


def _num_steps(args: DrafterTrainingArguments, num_rows: int) -> int:
    epochs = math.ceil(args.num_train_epochs * _steps_per_epoch(args, num_rows))
    return args.max_steps if args.max_steps > 0 else epochs


def _steps_per_epoch(args: DrafterTrainingArguments, num_rows: int) -> int:
    rows_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return math.ceil(num_rows / rows_per_step)
