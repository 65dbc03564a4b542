"""Options of a training run: those of `TrainingArguments`, and those for drafters."""

from dataclasses import dataclass, field

from transformers import TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_available

from ..errors import OptionError

OWN_OPTIONS = (  # of the class below, those that decide what is learned
    *("use_glancing", "glancing_ratio", "feature_noise", "feature_loss_weight", "token_loss_weight"),
    *("ttt_steps", "ttt_decay", "num_anchors", "anneal_share"),
)
LEAST = {
    "num_anchors": 1,
    "ttt_steps": 1,
    "max_length": 1,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "eval_decode_prompts": 0,
    "eval_decode_tokens": 1,
}
NO_PUSH = (
    "A drafter must be published with its card, which the Trainer does not write. Leave `push_to_hub` out, save the "
    "drafter, and run `falcon-spec publish FOLDER OWNER/NAME`, or call `drafter.push_to_hub`."
)


@dataclass
class DrafterTrainingArguments(TrainingArguments):
    """`TrainingArguments` with options for drafters; defaults are the Falcon paper's where it gives one."""

    output_dir: str = field(default="trainer_output", metadata={"help": "Folder for checkpoints and the drafter."})
    max_length: int = field(default=512, metadata={"help": "Longest example in tokens, within the context."})
    use_glancing: bool = field(default=True, metadata={"help": "Show part of the truth in training (CSGD)."})
    glancing_ratio: float = field(
        default=0.4, metadata={"help": "Revealed rows per wrong row at the start; falls to 0."}
    )
    feature_noise: float = field(default=0.1, metadata={"help": "Uniform noise on input features, in feature units."})
    feature_loss_weight: float = field(default=1.0, metadata={"help": "Weight of the feature regression."})
    token_loss_weight: float = field(default=0.1, metadata={"help": "Weight of 0.9 KL + 0.1 cross-entropy."})
    ttt_steps: int = field(default=7, metadata={"help": "Eagle-3: steps that the drafter takes on its own states."})
    ttt_decay: float = field(default=0.8, metadata={"help": "Eagle-3: weight of a step over that of the one before."})
    num_anchors: int = field(
        default=32,
        metadata={"help": "Blocks that a DFlash or diffusion drafter fills in for each conversation of a batch."},
    )
    anneal_share: float = field(
        default=0.2,
        metadata={"help": "Full diffusion drafters: share of the training until they see all that follows a token."},
    )
    draft_tree_nodes: int = field(
        default=16,
        metadata={
            "help": "Nodes, root included, of the tree fitted to the evaluation data after training; 0 keeps the tree "
            "of the drafter's config."
        },
    )
    draft_tree_passes: int = field(default=1, metadata={"help": "Drafter passes that tree may take."})
    eval_decode_prompts: int = field(
        default=8,
        metadata={
            "help": "Prompts of the evaluation data that each evaluation decodes, for `eval_acceptance_length` and "
            "`eval_acceptance_at_depth_*`; 0 leaves these out."
        },
    )
    eval_decode_tokens: int = field(default=64, metadata={"help": "Most new tokens of each of these texts."})
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
        self._check_ranges()
        self.check_tree()
        if self.push_to_hub:
            raise OptionError(NO_PUSH)
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

    def _check_ranges(self) -> None:
        """Check each number by itself."""
        for name, least in LEAST.items():
            if int(getattr(self, name)) < least:
                raise OptionError(f"`{name}` must be at least {least}, but it is {getattr(self, name)}.")

        for name in ("glancing_ratio", "anneal_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"`{name}` must lie in 0..1, but it is {getattr(self, name)}.")

        if not 0 < self.ttt_decay <= 1:
            raise OptionError(f"`ttt_decay` must lie above 0 and up to 1, but it is {self.ttt_decay}.")

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
