"""LoRA on a drafter (arXiv 2106.09685), for targets that were fine-tuned: only an adapter is trained and saved."""

import copy
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from ..drafters.base import DrafterModel
from ..drafters.checkpoint import let_others_read
from ..errors import OptionError

ALL_LINEAR = "all-linear"  # PEFT's name for all linear layers
_PREFIX = "base_model.model."  # what PEFT adds to the names of weights
_COPY = ".modules_to_save.default"  # and to those of modules that are trained in full


@dataclass
class LoraOptions:
    """Options of LoRA; names and defaults are those of TRL's `ModelConfig`."""

    use_peft: bool = field(
        default=False, metadata={"help": "Train a LoRA adapter of `--drafter` and save the adapter alone."}
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "The adapter's output is multiplied by alpha / rank."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: [ALL_LINEAR],
        metadata={"help": "Names of the linear layers that it changes; `all-linear` for all."},
    )
    lora_modules_to_save: list[str] = field(
        default_factory=list,
        metadata={"help": "Names of modules that are trained in full as well, e.g. `recurrence`, Falcon's LSTM."},
    )

    def __post_init__(self) -> None:
        """Check the numbers, and that `use_peft` is set if another option is."""
        if self.lora_r < 1 or self.lora_alpha < 1:
            raise OptionError(
                f"`lora_r` and `lora_alpha` must be at least 1, but they are {self.lora_r} and {self.lora_alpha}."
            )

        given = []
        for option in fields(self):
            default = option.default if option.default_factory is MISSING else option.default_factory()
            if getattr(self, option.name) != default:
                given.append(f"`--{option.name}`")

        if given and not self.use_peft:
            raise OptionError(f"{', '.join(given)} must come with `--use_peft`, which asks for an adapter.")

    def to_config(self) -> LoraConfig:
        """The options as a `LoraConfig` of PEFT."""
        is_all = self.lora_target_modules == [ALL_LINEAR]
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            target_modules=ALL_LINEAR if is_all else self.lora_target_modules,
            modules_to_save=self.lora_modules_to_save or None,
        )


def with_lora(drafter: PreTrainedModel, options: LoraOptions) -> PeftModel:
    """Add a fresh adapter to a drafter, which is changed; only the adapter will be trained.

    Raises:
        [`OptionError`]: the drafter has no such modules, or was not loaded from a folder or the Hub.

    Example:

    ```python
    >>> from transformers_falcon_spec import FalconSpecDrafter
    >>> drafter = FalconSpecDrafter.from_pretrained("models/falcon-reference")
    >>> adapted = with_lora(drafter, LoraOptions(use_peft=True, lora_r=8))
    >>> adapted.peft_config["default"].base_model_name_or_path
    'models/falcon-reference'

    ```
    """
    if not drafter.name_or_path:
        raise OptionError(
            "An adapter must name the drafter that it changes, but this one was never saved. Save it and load it "
            "again."
        )

    parts = [f".{name}" for name in dict(drafter.named_modules())]
    unknown = []
    for name in options.lora_modules_to_save:
        if not any(part.endswith(f".{name}") for part in parts):
            unknown.append(name)

    if unknown:
        raise OptionError(
            f"`lora_modules_to_save` must name parts of a `{type(drafter).__name__}`, such as "
            f"{list(dict(drafter.named_children()))}, but they are {unknown}."
        )

    never_trained = {name for name, weight in drafter.named_parameters() if not weight.requires_grad}
    try:
        model = get_peft_model(drafter, options.to_config())
    except ValueError as error:
        raise OptionError(
            f"`lora_target_modules` must name linear layers of a `{type(drafter).__name__}`, but: {error}"
        ) from error

    for name, weight in model.named_parameters():
        if name.removeprefix(_PREFIX).replace(_COPY, "") in never_trained:
            weight.requires_grad_(False)
    return model


def save_adapter(model: PeftModel, folder: Path, with_tree: bool, in_bf16: bool) -> None:
    """Save the adapter without the drafter; with `in_bf16` in bfloat16, but loaded in the drafter's dtype.

    With `with_tree` the drafter's options are saved, too, with the static tree that was fitted with the adapter.
    """
    model = model.bfloat16() if in_bf16 else model
    model.save_pretrained(str(folder))
    let_others_read(folder)

    drafter = model.get_base_model()
    if with_tree and isinstance(drafter, DrafterModel):
        options = copy.deepcopy(drafter.generation_config)
        options.dynamic_tree = drafter.is_tree_dynamic
        options.draft_tree = drafter.stored_tree
        options.save_pretrained(folder)
