"""LoRA on a drafter (arXiv 2106.09685), for targets that were fine-tuned: only an adapter is trained and saved."""

import copy
from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from ..drafters.base import DrafterModel
from ..drafters.checkpoint import let_others_read
from ..errors import OptionError
from .options import ALL_LINEAR, LoraOptions


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

    parts = {name.rpartition(".")[2] for name in dict(drafter.named_modules())}
    unknown = sorted(set(options.lora_modules_to_save) - parts)
    if unknown:
        raise OptionError(
            f"`lora_modules_to_save` must name parts of a `{type(drafter).__name__}`, such as "
            f"{list(dict(drafter.named_children()))}, but they are {unknown}."
        )

    is_all = options.lora_target_modules == [ALL_LINEAR]
    config = LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        target_modules=ALL_LINEAR if is_all else options.lora_target_modules,
        modules_to_save=options.lora_modules_to_save or None,
    )
    try:
        return get_peft_model(drafter, config)
    except ValueError as error:
        raise OptionError(
            f"`lora_target_modules` must name linear layers of a `{type(drafter).__name__}`, but: {error}"
        ) from error


def save_adapter(model: PeftModel, folder: Path, with_tree: bool) -> None:
    """Save the adapter alone, and `with_tree` the drafter's options, with the tree and window of its evaluation."""
    model.save_pretrained(str(folder))
    let_others_read(folder)

    drafter = model.get_base_model()
    if with_tree and isinstance(drafter, DrafterModel):
        options = copy.deepcopy(drafter.generation_config)
        options.dynamic_tree = drafter.is_tree_dynamic
        options.draft_tree = drafter.stored_tree
        options.sliding_window = drafter.sliding_window  # training sets that of the config, which is not saved
        options.save_pretrained(folder)
