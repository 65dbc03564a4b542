"""LoRA on a drafter by PEFT (arXiv 2106.09685), to adapt it to a fine-tuned target; only the adapter is saved."""

import copy
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from ..drafters.base import DrafterModel
from ..errors import OptionError

ALL_LINEAR = "all-linear"  # PEFT's word for it
_PREFIX, _COPY = "base_model.model.", ".modules_to_save.default"  # in PEFT's names of weights


@dataclass
class LoraOptions:
    """Whether a drafter is trained by LoRA, and how; names and defaults are those of TRL's `ModelConfig`."""

    use_peft: bool = field(
        default=False, metadata={"help": "Train a LoRA adapter of `--drafter` and save the adapter alone."}
    )
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "The adapter counts alpha / rank times."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: [ALL_LINEAR],
        metadata={"help": "Names of the linear layers it is put on; `all-linear` for all."},
    )
    lora_modules_to_save: list[str] = field(
        default_factory=list,
        metadata={"help": "Names of parts trained as a whole beside it, e.g. `recurrence`, Falcon's LSTM."},
    )

    def __post_init__(self) -> None:
        """Check the numbers, and that options of an adapter come with one."""
        if self.lora_r < 1 or self.lora_alpha < 1:
            raise OptionError(
                f"`lora_r` and `lora_alpha` must be at least 1, but they are {self.lora_r} and {self.lora_alpha}."
            )
        own = [each for each in fields(self) if each.name != "use_peft"]
        given = [each.name for each in own if getattr(self, each.name) != _default(each)]
        if given and not self.use_peft:
            raise OptionError(
                f"{', '.join(f'`--{name}`' for name in given)} must come with `--use_peft`, which asks for an adapter."
            )

    def to_config(self) -> LoraConfig:
        """The same as PEFT has it."""
        is_all = self.lora_target_modules == [ALL_LINEAR]
        return LoraConfig(
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            target_modules=ALL_LINEAR if is_all else self.lora_target_modules,
            modules_to_save=self.lora_modules_to_save or None,
        )


def _default(each: "Field[Any]") -> Any:
    factory = each.default_factory
    return each.default if factory is MISSING else factory()


def with_lora(drafter: PreTrainedModel, options: LoraOptions) -> PeftModel:
    """The drafter with a fresh adapter, which is all that is trained.

    Args:
        drafter ([`~transformers.PreTrainedModel`]): Loaded from a folder or the Hub, so that the adapter can name it.
            Changed in place.
        options ([`LoraOptions`]): Where the adapter goes, and how large it is.

    Raises:
        [`OptionError`]: the drafter has no such parts, or was not loaded from anywhere.

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
    parts = [name for name, _ in drafter.named_modules()]
    unknown = [name for name in options.lora_modules_to_save if not any(_ends_in(part, name) for part in parts)]
    if unknown:
        children = [name for name, _ in drafter.named_children()]
        raise OptionError(
            f"`lora_modules_to_save` must name parts of a `{type(drafter).__name__}`, such as {children}, but they "
            f"are {unknown}."
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
    return cast(PeftModel, model)


def _ends_in(name: str, end: str) -> bool:
    """Whether PEFT takes the part `name` to be called `end`."""
    return name == end or name.endswith(f".{end}")


def save_adapter(model: PeftModel, folder: Path, with_tree: bool, in_bf16: bool) -> None:
    """Save the adapter alone; beside it, `with_tree`, the options of the drafter with the static tree that it has now.

    Args:
        model (`PeftModel`): A drafter with its adapter.
        folder (`Path`): Where to.
        with_tree (`bool`): The tree was fitted together with the adapter, so that the one in the drafter's folder is
            another.
        in_bf16 (`bool`): Half the bytes; it loads in the drafter's type all the same.
    """
    model = model.bfloat16() if in_bf16 else model
    model.save_pretrained(str(folder))
    drafter = model.get_base_model()
    if with_tree and isinstance(drafter, DrafterModel):
        options = copy.deepcopy(drafter.generation_config)
        options.dynamic_tree, options.draft_tree = drafter.is_tree_dynamic, drafter.stored_tree
        options.save_pretrained(folder)
