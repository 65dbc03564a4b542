"""Options of a training run: those of `TrainingArguments`, and those for drafters."""

from dataclasses import dataclass, field
from importlib import import_module

from transformers import TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_available

from ..core.options import check_options
from ..errors import OptionError
from .options import DrafterTrainingOptions

OWN_OPTIONS = (  # of the class below, those that decide what is learned
    *("use_glancing", "glancing_ratio", "feature_noise", "feature_loss_weight", "token_loss_weight"),
    *("ttt_steps", "ttt_decay", "num_anchors"),
)
AT_LEAST_ONE = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")


@dataclass
class DrafterTrainingArguments(DrafterTrainingOptions, TrainingArguments):
    """`TrainingArguments` with options for drafters; defaults are the Falcon paper's where it gives one."""

    output_dir: str = field(default="trainer_output", metadata={"help": "Folder for checkpoints and the drafter."})
    learning_rate: float = field(default=5e-4, metadata={"help": "The paper: 3e-5 over 800,000 steps."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta 2 of AdamW."})
    weight_decay: float = field(default=0.01, metadata={"help": "Decoupled weight decay."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay off: masks are columns too."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Every weight is used."})
    train_sampling_strategy: str = field(default="group_by_length", metadata={"help": "Less padding."})

    @property
    def n_gpu(self) -> int:
        """At most one, for a process trains on one device: several processes, not `nn.DataParallel`, share rows."""
        return min(super().n_gpu, 1)

    def __post_init__(self) -> None:
        """Check the options of this class, and that something is trained."""
        import_module("accelerate")  # Transformers asks for it, too, in words that name no extra
        check_options(self)
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise OptionError(f"`{name}` must be at least 1, but it is {getattr(self, name)}.")

        self.check_tree()
        if self.max_steps <= 0 and self.num_train_epochs <= 0:
            raise OptionError(
                "A run must take at least one step, but `num_train_epochs` is "
                f"{self.num_train_epochs} and `max_steps` {self.max_steps}. Raise one of them."
            )
        if not self.eval_decode_prompts and (self.metric_for_best_model or "").endswith("acceptance_length"):
            raise OptionError(
                f"`metric_for_best_model` is `{self.metric_for_best_model}`, which comes from decoding in evaluation, "
                "but `eval_decode_prompts` is 0. Decode some prompts, or choose another metric."
            )
        if self.deepspeed and not is_deepspeed_available():
            raise OptionError(
                f"`deepspeed` is {self.deepspeed!r}, but the package `deepspeed` is not installed. Install it, or "
                "leave the option out."
            )

        super().__post_init__()

    def check_tree(self) -> None:
        """Check the options of the tree that is fitted after training, which a recipe may change."""
        if self.draft_tree_nodes < 0 or self.draft_tree_nodes == 1 or self.draft_tree_passes < 1:
            raise OptionError(
                "`draft_tree_nodes` must be 0 or at least 2 and `draft_tree_passes` at least 1, but they are "
                f"{self.draft_tree_nodes} and {self.draft_tree_passes}."
            )
        if self.draft_tree_nodes == 0 and self.draft_tree_passes != 1:
            raise OptionError(
                f"`draft_tree_passes` is for a tree that is fitted, but it is {self.draft_tree_passes} and "
                "`draft_tree_nodes` is 0, which keeps the tree that the drafter has. Set `draft_tree_nodes`, too, or "
                "leave `draft_tree_passes` out."
            )
