"""The settings of a run that must stay the same from its first step to its last, whenever it is resumed."""

from typing import Any

from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from .arguments import OWN_OPTIONS, DrafterTrainingArguments

# Options of `TrainingArguments` that a resumed run would take from the checkpoint, or change in the middle.
_SHARED = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed", "data_seed"),
    "train_sampling_strategy",
)
# Of a drafter's config, what does not change what it learns, or is written when the run ends.
_PASSING = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("draft_tree", "confidence_temperatures", "target_name_or_path", "_attn_implementation"),
}


def run_settings(args: DrafterTrainingArguments, model: Any, data_digest: str, num_rows: int) -> dict[str, Any]:
    """The settings by name: options, the drafter with its config, and the data."""
    drafter: PreTrainedModel = unwrap_peft_model(model)
    options = {name: getattr(args, name, None) for name in (*_SHARED, *OWN_OPTIONS)}
    config = {name: value for name, value in drafter.config.to_dict().items() if name not in _PASSING}
    rows_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return {
        "drafter": type(drafter).__name__,
        "adapter": model is not drafter,
        **options,
        "rows of a step": rows_per_step,
        **{f"drafter_config.{name}": value for name, value in config.items()},
        "rows of the data": num_rows,
        "data": data_digest[:16],
    }
