"""The options of training. Help must answer at once, so nothing here loads PyTorch or Transformers."""

from dataclasses import MISSING, dataclass, fields

from ..core.options import check_options, option
from ..errors import OptionError

ALL_LINEAR = "all-linear"  # PEFT's name for all linear layers
PLAIN_TOKENS = 256  # the length of an answer
THINKING_TOKENS = 4096  # the same with a thought before it


@dataclass
class DrafterTrainingOptions:
    """How the drafter learns; defaults are the Falcon paper's where it gives one."""

    max_length: int = option(512, least=1, help="Longest example in tokens, within the context.")
    use_glancing: bool = option(True, help="Show part of the truth in training (CSGD).")
    glancing_ratio: float = option(0.4, least=0, most=1, help="Revealed rows per wrong row at the start; falls to 0.")
    feature_noise: float = option(0.1, help="Uniform noise on input features, in feature units.")
    feature_loss_weight: float = option(1.0, help="Weight of the feature regression.")
    token_loss_weight: float = option(0.1, help="Weight of 0.9 KL + 0.1 cross-entropy.")
    ttt_steps: int = option(7, least=1, help="Eagle-3: steps that the drafter takes on its own states.")
    ttt_decay: float = option(0.8, above=0, most=1, help="Eagle-3: weight of a step over that of the one before.")
    num_anchors: int = option(
        32, least=1, help="Blocks that a DFlash or diffusion drafter fills in for each conversation of a batch."
    )
    draft_tree_nodes: int = option(
        16,
        least=0,
        help="Nodes, root included, of the tree fitted to the evaluation data after training; 0 keeps the tree of the "
        "drafter's config.",
    )
    eval_decode_prompts: int = option(
        8,
        least=0,
        help="Prompts of the evaluation data that each evaluation decodes, for `eval_acceptance_length` and "
        "`eval_acceptance_at_depth_*`; 0 leaves these out.",
    )
    eval_decode_tokens: int = option(64, least=1, help="Most new tokens of each of these texts.")
    bf16: bool = option(False, help="Train in bfloat16.")


@dataclass
class LoraOptions:
    """Options of LoRA; names and defaults are those of TRL's `ModelConfig`."""

    use_peft: bool = option(False, help="Train a LoRA adapter of `--drafter` and save the adapter alone.")
    lora_r: int = option(16, least=1, help="Rank of the adapter.")
    lora_alpha: int = option(32, least=1, help="The adapter's output is multiplied by alpha / rank.")
    lora_target_modules: list[str] = option(
        [ALL_LINEAR], help="Names of the linear layers that it changes; `all-linear` for all."
    )
    lora_modules_to_save: list[str] = option(
        [], help="Names of modules that are trained in full as well, e.g. `recurrence`, Falcon's LSTM."
    )

    def __post_init__(self) -> None:
        """Check the numbers, and that `use_peft` is set if another option is."""
        check_options(self)
        given = []
        for each in fields(self):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if getattr(self, each.name) != default:
                given.append(f"`--{each.name}`")

        if given and not self.use_peft:
            raise OptionError(f"{', '.join(given)} must come with `--use_peft`, which asks for an adapter.")


@dataclass(frozen=True)
class RegenerateOptions:
    """How answers are generated. The same options and rows give the same file, even if the run is interrupted."""

    max_new_tokens: int | None = option(
        None,
        least=1,
        help=f"Most tokens of an answer; None is {PLAIN_TOKENS}, or {THINKING_TOKENS} where the chat template shows "
        "that answers begin with a thought.",
    )
    max_prompt_tokens: int = option(512, least=1)
    batch_size: int = option(32, least=1)
    temperature: float = option(0.7, least=0)  # 0 is greedy
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)
