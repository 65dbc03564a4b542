"""`falcon-spec train`: distil a drafter from a target, on conversations that the target answered.

Example: a drafter in 20 steps, on a single conversation (docs/train_your_own.md has the whole way):
  echo '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}' > talk.jsonl
  falcon-spec train --target models/reference-target --data talk.jsonl --output_dir my-drafter --max_steps 20
                    --report_to none
  falcon-spec generate --target models/reference-target --drafter my-drafter --prompt "What is 3 plus 4?" --compare
"""

import json
import logging
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import (
    EarlyStoppingCallback,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import IntervalStrategy, unwrap_peft_model

from ..errors import OptionError
from ..provenance import provenance
from ..training.arguments import DrafterTrainingArguments
from ..training.checkpoints import explain_write_errors, is_complete, newest_complete_checkpoint
from ..training.conversations import ConversationSet
from ..training.dataset import ConversationCollator, ConversationDataset
from ..training.estimate import estimate_run
from ..training.feature_cache import FeatureCache
from ..training.features import move_target
from ..training.lora import LoraOptions, save_adapter
from ..training.objectives import objective_of
from ..training.packed_conversations import PackedConversations
from ..training.recipes import Recipe, recipe_notes
from ..training.trainer import DrafterTrainer
from .dry_run import print_dry_run
from .loading import load_target, read_config, save_fields
from .mask_view import show_masks
from .memory import peak_device_bytes, peak_resident_bytes
from .train_drafter import check_drafter_options, check_packing, drafter_to_train, recipe_for
from .train_options import TrainCommand

logger = logging.getLogger(__name__)
help_notes = recipe_notes  # the help shows the defaults that the recipes give


def run(command: TrainCommand, args: DrafterTrainingArguments, lora: LoraOptions, given: Collection[str]) -> None:
    """Train and save the drafter with its draft tree and a record; `given` options win over the recipe."""
    if command.show_masks is not None:
        _show_masks(command, command.show_masks)
        return
    check_drafter_options(command, lora)
    device_map = command.device_map
    if command.dry_run:
        _check_dry_run(args)
    callbacks = _early_stopping(command, args)
    resume = None if command.dry_run else resume_point(args)
    set_seed(args.seed)
    read = {name: command.read_conversations(paths) for name, paths in command.sources.items()}
    target, tokenizer = load_target(command.target, command.target_dtype, device_map)
    data = {name: encode(part, tokenizer, command.max_length) for name, part in read.items()}
    drafter = drafter_to_train(command, lora, target, data["train"])
    check_packing(command, drafter)
    recipe = recipe_for(command, drafter)
    recipe.apply(args, given, getattr(drafter.config.get_text_config(), "hidden_size", None))
    if command.dry_run:
        uses_cache = command.cache_features is not None
        rows = packed(command, data["train"], args.seed)
        estimate = estimate_run(target, drafter, rows, args, tokenizer.pad_token_id, uses_cache)
        print_dry_run(estimate, target, drafter, data["train"].coverage, command.cache_features)
        return
    train_data: Any = data["train"]
    if command.cache_features is not None:
        bare = unwrap_peft_model(drafter)
        features = objective_of(bare).read_target(bare, target)
        drafter.to(args.device)  # type: ignore[arg-type]  # a decorator hides the signature
        move_target(target, args)
        train_data = FeatureCache(data["train"], features, command.cache_features)
    trainer = DrafterTrainer(
        target=target,
        model=drafter,
        args=args,
        train_dataset=packed(command, train_data, args.seed),
        eval_dataset=data.get("eval"),
        data_collator=ConversationCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    _train(trainer, resume, command, recipe)


def _train(trainer: DrafterTrainer, resume: str | None, command: TrainCommand, recipe: Recipe) -> None:
    """Train, evaluate, and save the drafter with a record of the run."""
    start = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        logger.warning("Interrupted. Go on from the newest checkpoint with `--resume_from_checkpoint true`.")
        raise
    seconds = time.perf_counter() - start
    if trainer.eval_dataset is not None:
        _evaluate(trainer)
    throughput = trainer.throughput.to_json()
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    # All processes take part, for each has a shard of the weights.
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if is_sharded else None
    if trainer.is_world_process_zero():
        args, drafter = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
        record = provenance(
            seed=args.seed,
            device=args.device,
            data=command.sources,
            train_seconds=seconds,
            num_resumed=int(resume is not None),
        )
        record |= throughput
        record["recipe"] = _effective(command.recipe, recipe, args, drafter.config)
        record |= {
            "peak_process_bytes": peak_resident_bytes(),
            "peak_device_bytes": peak_device_bytes(),
            "num_examples": _num_examples(trainer.train_dataset),
            "num_trained": trainer.get_num_trainable_parameters(),
            "curve": trainer.state.log_history,
        }
        with explain_write_errors(args.output_dir):
            if isinstance(drafter, PeftModel):
                is_fitted = trainer.objective.has_draft_tree and args.draft_tree_nodes > 0
                has_new_tree = trainer.eval_dataset is not None and is_fitted
                save_adapter(drafter, Path(args.output_dir), has_new_tree, command.save_bf16)
            else:
                save(drafter, Path(args.output_dir), command.save_bf16, state)
            if drafter.can_generate():  # a language model, which is used with a tokenizer
                trainer.processing_class.save_pretrained(args.output_dir)  # type: ignore[union-attr]
            (Path(args.output_dir) / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _num_examples(data: Any) -> int:
    """Count the conversations in the training data."""
    return len(data.conversations if isinstance(data, PackedConversations) else data)


def _effective(name: str, recipe: Recipe, args: DrafterTrainingArguments, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the options of the recipe with the values that were used."""
    return {
        "name": name,
        "training": {option: getattr(args, option) for option in recipe.training},
        "drafter_config": {option: getattr(config, option) for option in recipe.drafter_config},
    }


def _early_stopping(command: TrainCommand, args: DrafterTrainingArguments) -> list[TrainerCallback]:
    """Return the callback for `--early_stopping_patience`, or none without that option."""
    patience = command.early_stopping_patience
    if patience is None:
        return []
    if patience < 1:
        raise OptionError(f"`--early_stopping_patience` must be at least 1, but it is {patience}.")
    is_evaluated = bool(command.eval_data) and args.eval_strategy != IntervalStrategy.NO
    if not is_evaluated or args.metric_for_best_model is None:
        raise OptionError(
            "`--early_stopping_patience` needs `--eval_data`, an `--eval_strategy` and a `--metric_for_best_model` "
            "such as `acceptance_length`. Give all of them, and `--load_best_model_at_end true` to end with the best "
            "weights."
        )
    return [EarlyStoppingCallback(early_stopping_patience=patience)]


def encode(data: ConversationSet, tokenizer: PreTrainedTokenizerBase, max_length: int) -> ConversationDataset:
    """Turn conversations into tokens; each example keeps its origin."""
    return ConversationDataset(data.rows, tokenizer, max_length, data.origins)


def packed(command: TrainCommand, data: Any, seed: int) -> Any:
    """Pack conversations into rows if the command asks for it."""
    return PackedConversations.fill(data, command.max_length, seed) if command.packing else data


def _check_dry_run(args: DrafterTrainingArguments) -> None:
    """Refuse to estimate a resumed run, for the estimate counts all steps."""
    if args.resume_from_checkpoint is not None:
        raise OptionError(
            "`--dry_run` estimates a whole run, but `--resume_from_checkpoint` asks for the rest of one. Leave it out."
        )


def _show_masks(command: TrainCommand, num_examples: int) -> None:
    """Show which tokens count in the loss; of the target only the tokenizer is loaded."""
    if command.dry_run:
        raise OptionError("`--show_masks` and `--dry_run` each do one thing, but both are given. Give one of them.")
    if num_examples < 1:
        raise OptionError(f"`--show_masks` takes a number of examples of at least 1, but it is {num_examples}.")
    _, tokenizer = read_config(command.target)
    data = command.read_conversations()
    show_masks(encode(data, tokenizer, command.max_length), tokenizer, num_examples)


def _evaluate(trainer: DrafterTrainer) -> None:
    """Evaluate the drafter, and fit its draft tree, if it has one, to the evaluation data."""
    if trainer.objective.has_draft_tree:
        logger.info("Draft tree, by the evaluation data unless it was given: %s", trainer.fit_draft_tree().to_json())
    else:
        trainer.evaluate()


def resume_point(args: DrafterTrainingArguments) -> str | None:
    """Return the checkpoint to resume from: for `true` the newest complete one, else the given one, or none."""
    newest = newest_complete_checkpoint(args.output_dir)
    choice = args.resume_from_checkpoint
    if choice is None or str(choice).lower() == "false":
        if newest is not None and choice is None:
            raise OptionError(
                f"`{args.output_dir}` holds `{Path(newest).name}` of an earlier run. Go on with "
                "`--resume_from_checkpoint true`, or choose another `--output_dir`."
            )
        return None
    if str(choice).lower() == "true":
        return newest
    if not is_complete(Path(choice)):
        raise OptionError(f"`--resume_from_checkpoint` must be `true` or a whole checkpoint, but `{choice}` is none.")
    return str(choice)


def save(drafter: PreTrainedModel, folder: Path, in_bf16: bool, state: dict[str, Any] | None) -> None:
    """Save the drafter; with `in_bf16` weights are stored in bfloat16, but still loaded in float32.

    `state` holds the whole weights if the drafter is sharded.
    """
    if in_bf16 and state is not None:
        state = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
    elif in_bf16:
        drafter.bfloat16()
    drafter.save_pretrained(folder, state_dict=state)
    if in_bf16:
        save_fields(folder, {"dtype": "float32"})
