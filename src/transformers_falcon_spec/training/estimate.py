"""What a training run would take, from the longest step of the real Trainer and a sample of others.

Nothing is kept: what the steps write goes to a folder that is deleted, and the drafter that took them should be thrown
away.
"""

import copy
import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..errors import OptionError, TrainingError
from .arguments import DrafterTrainingArguments
from .dataset import ConversationCollator, ConversationDataset
from .feature_cache import FeatureCache, bytes_per_token
from .packed_conversations import PackedConversations
from .trainer import DrafterTrainer

NUM_LONGEST = 2  # steps that warm up and show the peak of memory: in the second one the optimiser has its state
NUM_TIMED = 8  # steps after these


@dataclass(frozen=True)
class RunEstimate:
    """What a run would take.

    Args:
        num_steps (`int`): Optimiser steps of the whole run.
        rows_per_step (`int`): Rows that each of them reads.
        num_rows (`int`): Rows of the data, each one conversation or, packed, several.
        step_seconds (`list[float]`): Of each timed step.
        cache_bytes (`int`): Features of all tokens on disk.
        extract_seconds (`float`, *optional*): To write them; None where the run reads the target at each step.
        peak_device_bytes (`int`, *optional*): Most bytes in tensors on a CUDA device; None without one.
    """

    num_steps: int
    rows_per_step: int
    num_rows: int
    step_seconds: list[float]
    cache_bytes: int
    extract_seconds: float | None
    peak_device_bytes: int | None

    @property
    def train_seconds(self) -> float:
        """All steps together."""
        return self.num_steps * statistics.fmean(self.step_seconds)


class _StepClock(TrainerCallback):
    """When each step ended; what lies between two ends is a whole step, its data included."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def estimate_run(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    data: ConversationDataset | PackedConversations,
    args: DrafterTrainingArguments,
    pad_token_id: int | None,
    uses_cache: bool = False,
) -> RunEstimate:
    """Take a few steps of the run that these arguments describe, and work out the rest.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target.
        drafter ([`~transformers.PreTrainedModel`]): A drafter that is not needed afterwards.
        data ([`ConversationDataset`] or [`PackedConversations`]): What would be trained on.
        args ([`DrafterTrainingArguments`]): How.
        pad_token_id (`int`, *optional*): Fills up rows.
        uses_cache (`bool`): Features are read from disk, once they are written there.

    Raises:
        [`OptionError`]: several processes.
        [`TrainingError`]: the longest batch does not fit into memory, or the loss diverged.
    """
    if args.world_size > 1:
        raise OptionError(
            f"`--dry_run` measures one process, but there are {args.world_size}. Start it without `torchrun`; several "
            "processes share the steps of an epoch."
        )
    clock = _StepClock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = DrafterTrainer(
            target=target,
            model=drafter,
            args=_trial_arguments(args, folder),
            train_dataset=data,
            data_collator=ConversationCollator(pad_token_id),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        num_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
        rows_per_step = trainer.get_total_train_batch_size(trainer.args)
        sample = data.subset(sample_rows(_epoch(trainer, data, rows_per_step), data, args.train_batch_size))
        trainer.train_dataset, extract_seconds = sample, None
        if uses_cache:
            extract_seconds = data.coverage.num_tokens * _extract(trainer, sample, Path(folder))
        _take_steps(trainer, NUM_LONGEST + NUM_TIMED)
    return RunEstimate(
        num_steps=num_steps or 0,  # None is for data without a length
        rows_per_step=rows_per_step,
        num_rows=len(data),
        step_seconds=[end - start for start, end in itertools.pairwise(clock.ends[NUM_LONGEST - 1 :])],
        cache_bytes=bytes_per_token(trainer.features) * data.coverage.num_tokens,
        extract_seconds=extract_seconds,
        peak_device_bytes=torch.cuda.max_memory_allocated() if args.device.type == "cuda" else None,
    )


def _extract(trainer: DrafterTrainer, sample: ConversationDataset | PackedConversations, folder: Path) -> float:
    """Write the sample's features and let the trainer read those; the seconds that a token took."""
    start = time.perf_counter()
    if isinstance(sample, PackedConversations):
        cache = FeatureCache(sample.conversations, trainer.features, folder)
        trainer.train_dataset = PackedConversations(cache, sample.bins)
    else:
        trainer.train_dataset = FeatureCache(sample, trainer.features, folder)
    return (time.perf_counter() - start) / sum(sample.lengths)


def _trial_arguments(args: DrafterTrainingArguments, folder: str) -> DrafterTrainingArguments:
    """The same, without anything that writes, reports, judges or publishes."""
    trial = copy.copy(args)
    changes = {
        "output_dir": folder,
        "save_strategy": SaveStrategy.NO,
        "eval_strategy": IntervalStrategy.NO,
        "logging_strategy": IntervalStrategy.NO,
        "report_to": [],
        "load_best_model_at_end": False,
        "push_to_hub": False,
        "disable_tqdm": True,
    }
    for name, value in changes.items():
        setattr(trial, name, value)
    return trial


def _take_steps(trainer: DrafterTrainer, num_steps: int) -> None:
    """So many steps on the trainer's data, in its order."""
    trainer.args.max_steps, trainer.args.train_sampling_strategy = num_steps, "sequential"
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"The longest batch must fit into the device's memory, but {error} Lower `--per_device_train_batch_size` "
            "(and raise `--gradient_accumulation_steps`) or `--max_length`."
        ) from error


def _epoch(
    trainer: DrafterTrainer, data: ConversationDataset | PackedConversations, rows_per_step: int
) -> list[list[int]]:
    """Rows of each whole step of an epoch; one with fewer rows than a step is read around."""
    order = list(trainer._get_train_sampler())
    order += itertools.islice(itertools.cycle(order), max(rows_per_step - len(data), 0))
    return [order[start : start + rows_per_step] for start in range(0, len(order) - rows_per_step + 1, rows_per_step)]


def sample_rows(steps: list[list[int]], data: ConversationDataset | PackedConversations, batch_size: int) -> list[int]:
    """Rows of `NUM_LONGEST` steps on the longest rows, then of `NUM_TIMED` steps of an epoch.

    These are the ones in the middle of equal parts of the epoch, sorted by size. So their mean time is that of the
    epoch however time grows with size, also where batches of like length make some steps many times longer than
    others.

    Args:
        steps (`list[list[int]]`): Rows of each step of an epoch.
        data ([`ConversationDataset`] or [`PackedConversations`]): Tells their lengths.
        batch_size (`int`): Rows that are padded to one length.
    """
    widths = data.lengths

    def size(step: list[int]) -> int:
        lengths = [widths[row] for row in step]
        return sum(max(lengths[start : start + batch_size]) for start in range(0, len(step), batch_size))

    by_size = sorted(steps, key=size)
    sample = [by_size[(2 * number + 1) * len(steps) // (2 * NUM_TIMED)] for number in range(NUM_TIMED)]
    longest = sorted(itertools.chain(*steps), key=lambda row: -widths[row])[: len(steps[0])]
    return [*longest * NUM_LONGEST, *itertools.chain(*sample)]
