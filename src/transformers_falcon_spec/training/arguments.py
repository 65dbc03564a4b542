"""Options of a training run: those of `TrainingArguments`, and those for drafters."""

from dataclasses import dataclass, field
from importlib import import_module

from transformers import TrainingArguments

from ..core.options import check_options, option
from .options import DrafterTrainingOptions

SAMPLERS = tuple(TrainingArguments.__dataclass_fields__["train_sampling_strategy"].metadata["choices"])


@dataclass
class DrafterTrainingArguments(DrafterTrainingOptions, TrainingArguments):
    """`TrainingArguments` with options for drafters; defaults are the Falcon paper's where it gives one."""

    output_dir: str = field(default="trainer_output", metadata={"help": "Folder for checkpoints and the drafter."})
    per_device_train_batch_size: int = option(8, least=1, help="Rows that a device reads at a time.")
    per_device_eval_batch_size: int = option(8, least=1, help="The same in evaluation.")
    gradient_accumulation_steps: int = option(1, least=1, help="Batches of a step.")
    learning_rate: float = field(default=5e-4, metadata={"help": "The paper: 3e-5 over 800,000 steps."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta 2 of AdamW."})
    weight_decay: float = field(default=0.01, metadata={"help": "Decoupled weight decay."})
    remove_unused_columns: bool = option(False, one_of=(False,), help="Must stay off: masks are columns too.")
    label_smoothing_factor: float = option(0.0, one_of=(0, 0.0), help="Must stay 0: drafters learn distributions.")
    bf16_full_eval: bool = option(False, one_of=(False,), help="Must stay off: weights that are saved are rounded.")
    fp16_full_eval: bool = option(False, one_of=(False,), help="Must stay off, as `bf16_full_eval`.")
    batch_eval_metrics: bool = option(False, one_of=(False,), help="Must stay off: of a batch only counts are kept.")
    eval_do_concat_batches: bool = option(True, one_of=(True,), help="Must stay on: counts of batches are summed.")
    include_for_metrics: list[str] = option([], one_of=([],), help="Must stay empty: metrics are those of drafters.")
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Every weight is used."})
    train_sampling_strategy: str = option("group_by_length", one_of=SAMPLERS, help="Less padding.")

    @property
    def n_gpu(self) -> int:
        """At most one, for a process trains on one device: several processes, not `nn.DataParallel`, share rows."""
        return min(super().n_gpu, 1)

    def __post_init__(self) -> None:
        """Check the options of this class."""
        import_module("accelerate")  # Transformers asks for it, too, in words that name no extra
        check_options(self)
        if self.prediction_loss_only:  # then there is nothing to fit a tree to
            self.draft_tree_nodes = self.eval_decode_prompts = 0

        super().__post_init__()
