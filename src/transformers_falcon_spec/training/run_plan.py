"""Options of a training run that follow from target, data and device, each with its reason; given ones are kept."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..drafters.config_fields import context_of
from .arguments import DrafterTrainingArguments
from .chat_template import ChatTemplate, Message
from .dataset import USUAL_SHARE, example_lengths, usual_length

# As most drafters of `LOG.md` were trained: 8 conversations a step, 8,000 steps at most.
ROWS_PER_STEP, MOST_STEPS, MOST_EPOCHS = 8, 8_000, 8
MOST_HELD_OUT, HELD_OUT_SHARE = 64, 20  # conversations; one in so many
NUM_SAMPLED = 200  # rows whose lengths are looked at
LENGTH_STEP = 512  # tokens
LOGITS_COPIES = 6  # of a batch in float32: the target's and the drafter's, their softmax, and the gradients of both
_GIVEN = "as asked for"


PLAN_NOTES = {  # what is done without an option, for `--help`
    "output_dir": "By default `TARGET-falcon`, after target and kind.",
    "max_length": f"By default {LENGTH_STEP}, or as many times that as leave {USUAL_SHARE:.0%} of the examples "
    "whole, up to the target's context.",
    "bf16": "Train in bfloat16. By default on CUDA where the GPU has it.",
    "per_device_train_batch_size": f"Rows that are read at a time. By default {ROWS_PER_STEP}, or fewer where an "
    "estimate says that they would take more than half of the free memory.",
    "gradient_accumulation_steps": f"Batches of a step. By default what makes {ROWS_PER_STEP} rows a step.",
    "max_steps": f"By default {MOST_EPOCHS} epochs, but no more than {MOST_STEPS} steps unless one epoch takes more.",
    "num_train_epochs": "Epochs, instead of steps.",
    "save_total_limit": "Checkpoints to keep. By default the newest.",
    "logging_steps": "Steps from one line of the log to the next. By default a twentieth of the run, 100 at most.",
    "eval_strategy": "When to evaluate besides the one time at the end: no, steps or epoch. (default: no)",
    "resume_from_checkpoint": "`true` goes on from the newest checkpoint in the folder, after a break.",
    "report_to": "Who is told of losses and metrics: none, tensorboard, wandb, trackio ... (default: none)",
    "seed": "(default: 42)",
}


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
    context = context_of(config)
    if "max_length" in given:
        reason = _GIVEN if context is None or args.max_length <= context else "the target's context, which is shorter"
        args.max_length = min(args.max_length, context or args.max_length)
        return Choice("length", f"{args.max_length} tokens", reason)
    lengths = example_lengths(rows[:: math.ceil(len(rows) / NUM_SAMPLED)], template)
    fitting = max(math.ceil(usual_length(lengths) / LENGTH_STEP), 1) * LENGTH_STEP
    args.max_length = min(fitting, context or fitting)
    num_whole = sum(length <= args.max_length for length in lengths)
    reason = f"{num_whole} of a sample of {len(lengths)} examples are whole"
    return Choice("length", f"{args.max_length} tokens", reason)


def plan_run(
    args: DrafterTrainingArguments, given: Collection[str], lengths: Sequence[int], target: Any, device: Device
) -> list[Choice]:
    """Write into `args` what the user has not `given`, for rows of these `lengths` in tokens; returns the plan."""
    bytes_free = None if device.free_bytes is None else device.free_bytes - _bytes_to_come(target, device)
    batch = _plan_batch(args, given, bytes_of_row(target, max(lengths)), bytes_free)
    steps = _plan_steps(args, given, len(lengths))
    if "logging_steps" not in given:
        args.logging_steps = min(max(_num_steps(args, len(lengths)) // 20, 1), 100)
    if "dataloader_pin_memory" not in given:
        args.dataloader_pin_memory = device.kind != "cpu"  # it is for copies to a device
    return [_plan_precision(args, given, device), batch, steps, _plan_checkpoints(args, given)]


def bytes_of_row(target: Any, length: int) -> int:
    """About what a row of so many tokens takes while the drafter learns from it: its logits, by far the most."""
    vocab_size: int = target.config.get_text_config(decoder=True).vocab_size
    return 4 * LOGITS_COPIES * vocab_size * length


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
        args.bf16, args.mixed_precision = True, "bf16"
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
    per_epoch, reason = _steps_per_epoch(args, num_rows), _GIVEN
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
