"""`falcon-spec train`: distil a drafter from a target, on conversations that the target answered."""

import json
import logging
import shutil
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, unwrap_peft_model
from transformers.utils import CONFIG_NAME
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from ..drafters.checkpoint import let_others_read
from ..drafters.registry import method_of
from ..errors import OptionError, TrainingError
from ..provenance import portable
from ..training.arguments import DrafterTrainingArguments
from ..training.chat_template import ChatTemplate
from ..training.conversations import ConversationSet
from ..training.dataset import ConversationDataset, examples, survey
from ..training.features import FeatureCache, TargetFeatures, move_target
from ..training.lora import save_adapter, with_lora
from ..training.metrics import check_target_can_verify
from ..training.objectives import Objective, objective_of
from ..training.options import LoraOptions
from ..training.recipes import (
    Choice,
    Device,
    Recipe,
    held_out_rows,
    make_drafter,
    plan_length,
    plan_run,
    recipe_of,
)
from ..training.row_encoding import describe_rows
from ..training.trainer import RECORD, DrafterTrainer, newest_checkpoint
from .loading import load_target, load_trainable, read_config
from .options import DEFAULT_METHOD, TrainCommand
from .train_report import chance, costs, drafter_choice, print_masks, print_plan, summary, vocabulary_choice

logger = logging.getLogger(__name__)
WHY_NOT_EVALUATED = "there is no held-out text: give `--eval_data`, or 20 conversations at least"


def run(command: TrainCommand, lora: LoraOptions, args: DrafterTrainingArguments, given: Collection[str]) -> None:
    """Train and save the drafter with its draft tree and a record; `given` options win over the recipe."""
    _check_drafter_options(command, lora)
    is_compared = args.eval_strategy != IntervalStrategy.NO and args.metric_for_best_model is not None
    if command.early_stopping_patience is not None and not is_compared:
        raise OptionError(
            "`--early_stopping_patience` needs evaluations to compare and says by what, but one of them is not given: "
            "add `--eval_strategy steps` and `--metric_for_best_model acceptance_length`."
        )

    if "output_dir" not in given:
        args.output_dir = command.default_folder

    if command.show_masks is not None:
        _show_masks(command, command.show_masks, args, given)
        return

    resume = None if command.dry_run else _resume_point(args)
    set_seed(args.seed)

    read, held_out = _read(command)
    device = command.target_device_map or "cpu"  # from where it is moved to the drafter's device
    target, tokenizer = load_target(command.target, command.target_dtype, device, command.gguf_file)
    command.check_template(tokenizer)
    template = ChatTemplate(tokenizer, command.template_kwargs)
    length = plan_length(args, given, read.rows, template, target.config)
    data = read.encoded(tokenizer, args.max_length, command.template_kwargs)

    drafter, recipe = _drafter_to_train(command, lora, target, data)
    recipe.apply(args, given, getattr(drafter.config.get_text_config(), "hidden_size", None))
    objective = _objective(args, drafter, target)
    features = objective.features
    survey(data, target, features.distance, "the training data")  # before features are read for hours
    eval_data = _evaluation_data(command, args, held_out, tokenizer, features)
    rows = _training_rows(command, args, data, features, drafter)

    choices = [*_choices(command, data, eval_data, drafter), chance(objective), length]
    choices += plan_run(objective, given, rows.lengths, Device.of(args.device))
    choices.append(Choice("folder", str(args.output_dir), ""))
    if command.dry_run:
        choices += costs(objective, drafter, rows.lengths)
    if args.process_index == 0:
        print_plan(choices)

    if command.dry_run:
        print("Nothing was trained or written.")
        return

    patience = command.early_stopping_patience
    trainer = DrafterTrainer(
        target=target,
        model=drafter,
        args=args,
        train_dataset=rows,
        eval_dataset=eval_data,
        processing_class=tokenizer,
        callbacks=None if patience is None else [EarlyStoppingCallback(patience)],
    )
    seconds = _train(trainer, resume)
    _save(trainer, command, recipe)
    if trainer.is_world_process_zero():
        names = {"target": command.target, "folder": str(args.output_dir)}
        print(summary(trainer.state.log_history, trainer.drafter, names, seconds, WHY_NOT_EVALUATED))


def _check_drafter_options(command: TrainCommand, lora: LoraOptions) -> None:
    """Check, before anything is loaded, that the options for drafter, method, recipe and adapter go together."""
    if command.drafter is None:
        recipe_of(command.recipe, command.method or DEFAULT_METHOD)
        if lora.use_peft:
            raise OptionError("`--use_peft` needs `--drafter`: an adapter is trained on a drafter that is there.")
    elif command.method is not None or command.drafter_config:
        raise OptionError("`--drafter` says itself what it is: leave out `--method` and `--drafter_config`.")


def _resume_point(args: DrafterTrainingArguments) -> str | None:
    """The checkpoint to resume from: for `true` the newest one, else the given one, or none."""
    folder = Path(str(args.output_dir))
    choice = str(args.resume_from_checkpoint or "")
    newest = newest_checkpoint(folder)
    if not choice:
        _check_is_free(folder, newest)

    if choice.lower() in ("", "false"):
        return None

    if choice.lower() != "true":
        return choice

    if newest is None:
        raise OptionError(
            f"`--resume_from_checkpoint true` needs a checkpoint that was written to its end, but `{folder}` holds "
            "none. Leave the option out to start anew, or name the folder of the run as `--output_dir`."
        )

    return newest


def _check_is_free(folder: Path, newest: str | None) -> None:
    """Refuse a folder with checkpoints or a model, which a run would write over."""
    if newest is not None:
        raise OptionError(
            f"`{folder}` holds `{Path(newest).name}` of an earlier run. Go on with "
            "`--resume_from_checkpoint true`, or choose another `--output_dir`."
        )

    for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME):
        if (folder / name).is_file():
            raise OptionError(
                f"`{folder}` must hold no model, for it would be written over, but it holds `{name}`. Choose another "
                "`--output_dir`, or write over it with `--resume_from_checkpoint false`."
            )


def _show_masks(
    command: TrainCommand, num_examples: int, args: DrafterTrainingArguments, given: Collection[str]
) -> None:
    """Show which tokens count in the loss; of the target only the tokenizer is loaded."""
    config, tokenizer = read_config(command.target, command.gguf_file)
    command.check_template(tokenizer)
    template = ChatTemplate(tokenizer, command.template_kwargs)
    read = command.read_conversations()
    plan_length(args, given, read.rows, template, config)
    shown = read.encoded(tokenizer, args.max_length, command.template_kwargs)
    print_masks(shown, tokenizer, num_examples)


def _read(command: TrainCommand) -> tuple[ConversationSet, ConversationSet]:
    """The conversations to train on, and those to evaluate on, which may be none."""
    read = command.read_conversations()
    if command.eval_data:
        held_out = command.read_conversations(command.eval_data)
        num_known = held_out.num_asked_by(read)
        if num_known:
            logger.warning(
                "%d of %s to evaluate on ask what rows of the training ask: what is measured there is not what new "
                "prompts bring.",
                num_known,
                examples(len(held_out.rows)),
            )

        return read, held_out

    return read.split(held_out_rows(len(read.rows)))


def _config_fields(entries: list[str]) -> dict[str, Any]:
    """Parse config fields from `NAME=VALUE`; a value that is no JSON (`3`, `true`, `[0, -1]`) is a string."""
    found = {}
    for entry in entries:
        name, is_given, value = entry.partition("=")
        if not is_given:
            raise OptionError(f"`--drafter_config` takes NAME=VALUE, such as `block_size=3`, but got `{entry}`.")

        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value

    return found


def _drafter_to_train(
    command: TrainCommand, lora: LoraOptions, target: PreTrainedModel, data: ConversationDataset
) -> tuple[PreTrainedModel, Recipe]:
    """Make a fresh drafter, or load an existing one, with a new adapter if asked; returns its recipe, too."""
    if command.drafter is None:
        recipe = recipe_of(command.recipe, command.method or DEFAULT_METHOD)
        fields = _config_fields(command.drafter_config)
        drafter = make_drafter(command.method or DEFAULT_METHOD, target, data, recipe, **fields)
    else:
        drafter = load_trainable(command.drafter, target)
        method = method_of(drafter)
        name = method.name if method else type(drafter).__name__
        recipe = replace(recipe_of(command.recipe, name), drafter_config={})

    if lora.use_peft:
        drafter = with_lora(drafter, lora)  # type: ignore[assignment]  # it forwards

    return drafter, recipe


def _objective(args: DrafterTrainingArguments, drafter: PreTrainedModel, target: PreTrainedModel) -> Objective:
    """What the drafter learns, from a target that evaluation can decode with."""
    bare = unwrap_peft_model(drafter)
    if args.eval_decode_prompts:
        check_target_can_verify(bare, target)

    objective = objective_of(bare)
    return objective(bare, objective.read_target(bare, target), args)


def _evaluation_data(
    command: TrainCommand,
    args: DrafterTrainingArguments,
    held_out: ConversationSet,
    tokenizer: PreTrainedTokenizerBase,
    features: TargetFeatures,
) -> ConversationDataset | None:
    """The examples to evaluate on; None where nothing was held out, or nothing of it can be used."""
    if not held_out.rows:
        return None

    try:
        data = held_out.encoded(tokenizer, args.max_length, command.template_kwargs)
        survey(data, features.target, features.distance, "the evaluation data")
    except TrainingError as error:
        if command.eval_data or args.eval_strategy != IntervalStrategy.NO:
            raise

        logger.warning("Nothing is evaluated, for what was held out cannot be used: %s", error)
        return None

    return data


def _training_rows(
    command: TrainCommand,
    args: DrafterTrainingArguments,
    data: ConversationDataset,
    features: TargetFeatures,
    drafter: PreTrainedModel,
) -> ConversationDataset | FeatureCache:
    """The training data, with features on disk where the command asks for it."""
    if command.cache_features is None or command.dry_run:
        return data

    drafter.to(args.device)  # type: ignore[arg-type]  # a decorator hides the signature
    move_target(features.target, args)
    return FeatureCache(data, features, command.cache_features)


def _choices(
    command: TrainCommand, data: ConversationDataset, eval_data: ConversationDataset | None, drafter: PreTrainedModel
) -> list[Choice]:
    """The lines of the plan on target, data and drafter."""
    what = "given" if command.eval_data else "one in twenty, 64 at most; `--eval_data` names others"
    return [
        Choice("target", command.target, ""),
        Choice("data", str(data.coverage), ""),
        Choice("rows", describe_rows(data.treatments), ""),
        Choice("held out", examples(len(eval_data or ())), WHY_NOT_EVALUATED if eval_data is None else what),
        drafter_choice(drafter),
        *vocabulary_choice(drafter, data),
    ]


def _train(trainer: DrafterTrainer, resume: str | None) -> float:
    """Train, evaluate, and fit the draft tree, if there is one, to the evaluation data; returns the seconds."""
    start = time.perf_counter()
    if resume is None and trainer.is_world_process_zero():
        # A later run would go on from what a run that is written over left, for its steps may be higher.
        for checkpoint in Path(str(trainer.args.output_dir)).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(checkpoint)

    try:
        trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        logger.warning("Interrupted. Go on from the newest checkpoint with `--resume_from_checkpoint true`.")
        raise

    seconds = time.perf_counter() - start
    if trainer.eval_dataset is not None:
        metrics = _newest_evaluation(trainer) or trainer.evaluate()
        if trainer.objective.has_draft_tree:
            tree = trainer.fit_draft_tree(metrics).to_json()
            logger.info("Draft tree, by the evaluation data unless it was given: %s", tree)

    return seconds


def _newest_evaluation(trainer: DrafterTrainer) -> dict[str, Any] | None:
    """The metrics of the last step, if that was evaluated and its weights were kept."""
    last = trainer.state.log_history[-2:]  # the last line is that of the whole run
    found = (row for row in last if "eval_loss" in row and row["step"] == trainer.state.global_step)
    return None if trainer.args.load_best_model_at_end else next(found, None)


def _save(trainer: DrafterTrainer, command: TrainCommand, recipe: Recipe) -> None:
    """Save the drafter with a record of the run; all processes take part, for each may have a shard of the weights."""
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if is_sharded else None
    if not trainer.is_world_process_zero():
        return

    args = trainer.args
    drafter = trainer.accelerator.unwrap_model(trainer.model)
    folder = Path(args.output_dir)
    if isinstance(drafter, PeftModel):
        is_fitted = trainer.objective.has_draft_tree and args.draft_tree_nodes > 0
        save_adapter(drafter, folder, trainer.eval_dataset is not None and is_fitted)
    else:
        drafter.save_pretrained(folder, state_dict=state)
        let_others_read(folder)

    if drafter.can_generate():  # a language model, which is used with a tokenizer
        trainer.processing_class.save_pretrained(folder)  # type: ignore[union-attr]

    record = trainer.record()
    record["data"] = portable(command.sources)
    record["recipe"] = {  # with the values that were used
        "name": command.recipe,
        "training": {option: getattr(args, option) for option in recipe.training},
        "drafter_config": {option: getattr(drafter.config, option) for option in recipe.drafter_config},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
