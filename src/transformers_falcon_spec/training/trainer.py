"""Distilling a drafter from its frozen target with `transformers.Trainer`.

`DrafterTrainer` replaces the loss and what evaluation counts; everything else (devices, accumulation, checkpoints,
resuming, reporters) is the Trainer's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from ..core.tree import DraftTree
from ..drafters.base import DrafterModel
from ..errors import OptionError, TrainingError
from .checkpoints import writing_to
from .features import PairBatch, TargetFeatures
from .glancing import glancing_budget, reveal, reveal_mask
from .losses import DistillationLoss, distillation_loss

MIN_TREE_NODES = 2  # the root and one draft
MAX_RANK = 10  # ranks of the drafter's list whose acceptance is measured


@dataclass
class DrafterTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the drafter's own; defaults of these are the paper's where it gives one."""

    output_dir: str = field(default="trainer_output", metadata={"help": "Folder for checkpoints and the drafter."})
    use_glancing: bool = field(default=True, metadata={"help": "Show part of the truth in training (CSGD)."})
    glancing_ratio: float = field(
        default=0.4, metadata={"help": "Revealed rows per wrong row at the start; falls to 0."}
    )
    feature_noise: float = field(default=0.1, metadata={"help": "Uniform noise on input features, in feature units."})
    feature_loss_weight: float = field(default=1.0, metadata={"help": "Weight of the feature regression."})
    token_loss_weight: float = field(default=0.1, metadata={"help": "Weight of 0.9 KL + 0.1 cross-entropy."})
    draft_tree_nodes: int = field(
        default=16,
        metadata={"help": "Nodes, root included, of the tree fitted to the evaluation data after training."},
    )
    draft_tree_passes: int = field(default=1, metadata={"help": "Drafter passes that tree may take."})
    learning_rate: float = field(default=5e-4, metadata={"help": "The paper: 3e-5 over 800,000 steps."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta 2 of AdamW."})
    weight_decay: float = field(default=0.01, metadata={"help": "Decoupled weight decay."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay off: masks are columns too."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Every weight is used."})
    train_sampling_strategy: str = field(default="group_by_length", metadata={"help": "Less padding."})

    def __post_init__(self) -> None:
        """Check the options of this class."""
        if not 0 <= self.glancing_ratio <= 1:
            raise OptionError(f"`glancing_ratio` must lie in 0..1, but it is {self.glancing_ratio}.")
        if self.draft_tree_nodes < MIN_TREE_NODES or self.draft_tree_passes < 1:
            raise OptionError("`draft_tree_nodes` must be at least 2 and `draft_tree_passes` at least 1.")
        super().__post_init__()


class SeededLengthGroups(LengthGroupedSampler):
    """Rows of like length together, in an order that its seed alone decides, so that a resumed run reads the same."""

    def __init__(self, sampler: LengthGroupedSampler, seed: Callable[[], int]) -> None:
        super().__init__(sampler.batch_size, lengths=sampler.lengths, generator=torch.Generator())
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        """One epoch's order."""
        self.generator.manual_seed(self._seed())
        return super().__iter__()


class DrafterTrainer(Trainer):
    """Trains a drafter on the features and distributions of its frozen target.

    Args:
        target ([`~transformers.PreTrainedModel`]): The target; stays as it is.
        model ([`DrafterModel`]): The drafter.
        args ([`DrafterTrainingArguments`]): How to train.
        kwargs: The other arguments of `transformers.Trainer`; data as `ConversationDataset` and `ConversationCollator` give it.

    Raises:
        [`DrafterMismatchError`]: the drafter does not fit the target.
    """

    loss_is_scaled_for_ga = False  # the loss is a mean: the Trainer divides when it accumulates gradients
    args: DrafterTrainingArguments

    def __init__(self, *, target: PreTrainedModel, model: DrafterModel, **kwargs: Any) -> None:
        model.check_target(target)
        super().__init__(model=model, compute_metrics=acceptance_metrics, **kwargs)
        self.model_accepts_loss_kwargs = False
        self.block_size: int = model.config.block_size
        target.to(self.args.device)  # type: ignore[arg-type]  # a decorator hides the signature
        self.features = TargetFeatures(target, model.feature_layers, self.block_size)
        self._sums: dict[str, float] = {}
        self._num_calls = 0
        self._micro_step = (-1, 0)  # global step, batches seen in it

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, but one that groups by length draws from seed and epoch, not from the global stream."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        return SeededLengthGroups(sampler, lambda: self.args.seed + int(self.state.epoch or 0))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's own, with a failed write told in words."""
        with writing_to(self.args.output_dir):
            super()._save_checkpoint(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,  # noqa: ARG002  the Trainer passes it
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Distillation loss of one batch; with `use_glancing` the drafter sees the batch twice."""
        pairs = self.features(inputs)
        if not pairs.is_counted.any():
            raise TrainingError(
                "A batch must hold at least one assistant token that can be drafted; raise `max_length`."
            )
        generator = self._generator(model.training)
        phases = torch.randint(self.block_size, (len(pairs.is_token),), generator=generator).to(pairs.is_token.device)
        noisy = self._with_noise(pairs, generator) if model.training else pairs
        wanted = self.features.head(pairs.labels[pairs.is_counted])
        revealed = self._glance(model, pairs, noisy, wanted, phases, generator) if model.training else noisy
        predicted = model(revealed.token_embeds, revealed.features, phases, revealed.is_token)
        counted = revealed.is_counted
        logits, wanted = self.features.head(predicted[counted]), wanted[counted[pairs.is_counted]]
        loss = distillation_loss(predicted[counted], pairs.labels[counted], logits, wanted)
        self._note(loss)
        total = loss.total(self.args.feature_loss_weight, self.args.token_loss_weight)
        return (total, self._rank_counts(logits, wanted, counted, phases)) if return_outputs else total

    def _generator(self, is_training: bool) -> torch.Generator:
        """A generator that depends on seed, step and process alone, so that a resumed run draws the same."""
        step = self.state.global_step if is_training else 0
        previous, count = self._micro_step
        self._micro_step = (step, count + 1 if step == previous and is_training else 0)
        key = ((self.args.seed * 1_000_003 + step) * 4_096 + self._micro_step[1]) * 1_024 + self.args.process_index
        return torch.Generator().manual_seed(key % (2**63))

    def _with_noise(self, pairs: PairBatch, generator: torch.Generator) -> PairBatch:
        """Uniform noise on the input features: what the drafter feeds itself in later passes is not exact either."""
        noise = torch.rand(pairs.features.shape, generator=generator).to(pairs.features) * 2 - 1
        return replace(pairs, features=pairs.features + self.args.feature_noise * noise)

    def _glance(
        self,
        model: nn.Module,
        clean: PairBatch,
        noisy: PairBatch,
        wanted: Tensor,
        phases: Tensor,
        generator: torch.Generator,
    ) -> PairBatch:
        """Pass 1 without gradient counts what the drafter gets wrong; part of the truth is then shown for pass 2."""
        if not self.args.use_glancing or self.block_size == 1:
            return noisy
        with torch.no_grad():
            predicted = model(noisy.token_embeds, noisy.features, phases, noisy.is_token)[noisy.is_counted]
            wrong = self.features.head(predicted).argmax(-1) != wanted.argmax(-1)
        progress = self.state.global_step / max(self.state.max_steps, 1)
        budget = glancing_budget(int(wrong.sum()), self.args.glancing_ratio, progress)
        mask = reveal_mask(noisy.is_counted, phases, self.block_size, budget, generator)
        return reveal(noisy, clean.features, mask, self.block_size)

    def _note(self, loss: DistillationLoss) -> None:
        self._num_calls += 1
        for name, term in vars(loss).items():
            self._sums[name] = self._sums.get(name, 0.0) + term.item()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the means of the loss's terms since the last log."""
        if self._num_calls and "loss" in logs:
            logs = {**logs, **{name: total / self._num_calls for name, total in self._sums.items()}}
        self._sums, self._num_calls = {}, 0
        super().log(logs, *args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,  # noqa: ARG002  the Trainer passes it
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Loss, and how often the target's best token stood at each rank of each block position."""
        with torch.no_grad():
            loss, counts = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)
        return (loss.detach(), None, None) if prediction_loss_only else (loss.detach(), counts, counts[..., :1])

    def _rank_counts(self, logits: Tensor, wanted: Tensor, counted: Tensor, phases: Tensor) -> Tensor:
        """`[1, k, MAX_RANK + 1]` rows by block position and rank; the last column holds those beyond the list."""
        place = ((torch.arange(counted.shape[1], device=counted.device) - phases[:, None]) % self.block_size)[counted]
        best = logits.topk(min(MAX_RANK, logits.shape[-1]), dim=-1).indices == wanted.argmax(-1, keepdim=True)
        rank = torch.where(best.any(-1), best.int().argmax(-1), MAX_RANK)
        counts = torch.zeros(1, self.block_size, MAX_RANK + 1, device=logits.device)
        counts[0].index_put_((place, rank), torch.ones_like(rank, dtype=counts.dtype), accumulate=True)
        return counts

    def fit_draft_tree(self) -> DraftTree:
        """Give the drafter the best static tree for the acceptance measured on the evaluation data, and return it.

        Places beyond the first block are taken to be accepted as the same place in it.
        """
        metrics = self.evaluate()
        places = [
            [metrics[f"eval_rank_{rank}_at_{place + 1}"] for rank in range(MAX_RANK)]
            for place in range(self.block_size)
        ]
        acceptance = torch.tensor(places * self.args.draft_tree_passes)
        tree = DraftTree.best_first(acceptance, self.args.draft_tree_nodes)
        self.accelerator.unwrap_model(self.model).config.draft_tree = tree.to_json()
        return tree


def acceptance_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy by block position, top-k accuracy, and the share of each rank, from the counts of all batches."""
    counts = torch.as_tensor(prediction.predictions).sum(0)  # [k, ranks + 1]
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    metrics = {"accuracy": float(counts[:, 0].sum() / counts.sum())}
    for place, row in enumerate(shares, start=1):
        metrics[f"accuracy_at_{place}"] = float(row[0])
        metrics |= {f"top_{top}_accuracy_at_{place}": float(row[:top].sum()) for top in (2, 4, 8)}
        metrics |= {f"rank_{rank}_at_{place}": float(row[rank]) for rank in range(MAX_RANK)}
    return metrics
