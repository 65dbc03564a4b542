"""An estimate of the time, memory and disk space of a training run, from a few steps of the real Trainer.

The steps are the longest one and a sample of all lengths. Files go to a temporary folder; the drafter should not be
used any more.
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

NUM_LONGEST = 2  # steps of warm-up, whose memory is the peak: from the second on the optimiser has its state
NUM_TIMED = 8  # steps that are timed after the warm-up


@dataclass(frozen=True)
class RunEstimate:
    """The estimated size and duration of a training run."""

    num_steps: int
    rows_per_step: int
    num_rows: int  # packed rows hold several conversations
    step_seconds: list[float]  # of each timed step
    cache_bytes: int  # of the features of all tokens on disk
    extract_seconds: float | None  # to write them; None if the run reads the target in each step
    peak_device_bytes: int | None  # in tensors; None without a CUDA device

    @property
    def train_seconds(self) -> float:
        """The duration of all steps."""
        return self.num_steps * statistics.fmean(self.step_seconds)


class _StepClock(TrainerCallback):
    """Records when each step ends; between two ends lies one step, the loading of its data included."""

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
    """Estimate a training run from a few of its steps; with `uses_cache` it reads features from disk.

    Raises:
        [`OptionError`]: there are several processes.
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
        sample = data.subset(sample_rows(_epoch(trainer, data, rows_per_step), data.lengths, args.train_batch_size))
        trainer.train_dataset, extract_seconds = sample, None
        if uses_cache:
            extract_seconds = data.conversations.coverage.num_tokens * _extract(trainer, sample, Path(folder))
        _take_steps(trainer)
    return RunEstimate(
        num_steps=num_steps or 0,  # None is for data without a length
        rows_per_step=rows_per_step,
        num_rows=len(data),
        step_seconds=[end - start for start, end in itertools.pairwise(clock.ends[NUM_LONGEST - 1 :])],
        cache_bytes=bytes_per_token(trainer.features) * data.conversations.coverage.num_tokens,
        extract_seconds=extract_seconds,
        peak_device_bytes=torch.cuda.max_memory_allocated() if args.device.type == "cuda" else None,
    )


def _extract(trainer: DrafterTrainer, sample: ConversationDataset | PackedConversations, folder: Path) -> float:
    """Write the features of the sample and let the trainer read them; returns the seconds per token."""
    start = time.perf_counter()
    cache = FeatureCache(sample.conversations, trainer.features, folder)
    trainer.train_dataset = cache
    if isinstance(sample, PackedConversations):
        trainer.train_dataset = PackedConversations(cache, sample.bins)
    return (time.perf_counter() - start) / sum(sample.lengths)


def _trial_arguments(args: DrafterTrainingArguments, folder: str) -> DrafterTrainingArguments:
    """The arguments without saving, evaluation, logging and publishing."""
    trial = copy.copy(args)
    trial.output_dir, trial.report_to, trial.disable_tqdm = folder, [], True
    trial.save_strategy, trial.load_best_model_at_end, trial.push_to_hub = SaveStrategy.NO, False, False
    trial.eval_strategy = trial.logging_strategy = IntervalStrategy.NO
    return trial


def _take_steps(trainer: DrafterTrainer) -> None:
    """Take the steps of the trial in the order of the trainer's data."""
    trainer.args.max_steps, trainer.args.train_sampling_strategy = NUM_LONGEST + NUM_TIMED, "sequential"
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
    """The rows of each full step of an epoch; data with fewer rows than a step is repeated."""
    order = list(trainer._get_train_sampler())
    order += itertools.islice(itertools.cycle(order), max(rows_per_step - len(data), 0))
    return [order[start : start + rows_per_step] for start in range(0, len(order) - rows_per_step + 1, rows_per_step)]


def sample_rows(steps: list[list[int]], row_lengths: list[int], batch_size: int) -> list[int]:
    """Choose the rows of the trial: `NUM_LONGEST` steps with the longest rows, then `NUM_TIMED` steps of an epoch.

    The steps of the epoch are sorted by size, cut into `NUM_TIMED` equal parts, and the middle of each part is taken.
    Their mean time is that of the epoch however time grows with size, even where some steps are many times longer than
    others. `batch_size` rows are padded to one length.
    """

    def size(step: list[int]) -> int:
        lengths = [row_lengths[row] for row in step]
        return sum(max(lengths[start : start + batch_size]) for start in range(0, len(step), batch_size))

    by_size = sorted(steps, key=size)
    sample = [by_size[(2 * number + 1) * len(steps) // (2 * NUM_TIMED)] for number in range(NUM_TIMED)]
    longest = sorted(itertools.chain(*steps), key=lambda row: -row_lengths[row])[: len(steps[0])]
    return [*longest * NUM_LONGEST, *itertools.chain(*sample)]
