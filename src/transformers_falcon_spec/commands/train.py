"""`falcon-spec train`: distil a drafter from a target, on conversations that the target answered.

Example: a drafter in 20 steps, on a single conversation (docs/train_your_own.md has the whole way):
  echo '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, how are you?"}]}' > talk.jsonl
  falcon-spec train --target models/reference-target --data talk.jsonl --output_dir my-drafter --max_steps 20 --report_to none
  falcon-spec generate --target models/reference-target --drafter my-drafter --prompt "What is 3 plus 4?" --compare
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..drafters.autoregressive import make_draft_model
from ..drafters.dflash import make_dflash
from ..drafters.diffuspec import DiffusionDrafter
from ..drafters.eagle import EagleDrafter
from ..drafters.falcon import FalconSpecDrafter
from ..drafters.medusa import MedusaDrafter
from ..errors import OptionError
from ..provenance import provenance
from ..training.arguments import DrafterTrainingArguments
from ..training.checkpoints import is_whole, newest_whole_checkpoint, writing_to
from ..training.conversations import ConversationSet
from ..training.dataset import ConversationCollator, ConversationDataset
from ..training.draft_vocabulary import most_frequent_tokens
from ..training.estimate import estimate_run
from ..training.feature_cache import FeatureCache
from ..training.objectives import objective_of
from ..training.trainer import DrafterTrainer
from .dry_run import print_dry_run
from .loading import load_target, read_config
from .mask_view import show_masks
from .training_data import FORBID_HELP, read_training_data

logger = logging.getLogger(__name__)

METHODS: dict[str, Callable[..., PreTrainedModel]] = {
    "ar": make_draft_model,
    "dflash": make_dflash,
    "diffusion": DiffusionDrafter.from_target,
    "eagle": EagleDrafter.from_target,
    "falcon": FalconSpecDrafter.from_target,
    "medusa": MedusaDrafter.from_target,
}


@dataclass
class TrainCommand:
    """What to train and on what; all options of `TrainingArguments` can be given too."""

    target: str = field(metadata={"help": "Folder or Hub name of the target."})
    data: list[str] = field(
        metadata={"help": "Conversations: .jsonl or .jsonl.gz files, or dataset names. Best answered by `regenerate`."}
    )
    eval_data: list[str] = field(
        default_factory=list, metadata={"help": "Held-out conversations: evaluation, draft tree."}
    )
    method: str = field(
        default="falcon",
        metadata={"help": "Kind of drafter; ar and dflash are for stock `generate`.", "choices": sorted(METHODS)},
    )
    drafter_config: list[str] = field(
        default_factory=list,
        metadata={"help": "Fields of the drafter's config as NAME=VALUE, e.g. `block_size=3 recurrence=token`."},
    )
    max_length: int = field(default=512, metadata={"help": "Longest example in tokens."})
    limit: int | None = field(default=None, metadata={"help": "Read this many conversations only."})
    forbid: list[str] = field(default_factory=list, metadata={"help": FORBID_HELP})
    target_dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    cache_features: str | None = field(
        default=None,
        metadata={"help": "Folder for the target's features: read once, then trained from. Pays from two epochs on."},
    )
    show_masks: int | None = field(
        default=None,
        metadata={
            "help": "Show so many examples with what counts in the loss in colour (5 if no number is given); no training.",
            "nargs": "?",
            "const": 5,
        },
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Say what would be trained and estimate time and memory; no training."}
    )
    save_bf16: bool = field(
        default=False, metadata={"help": "Store weights in bf16 at half the bytes; loads as fp32."}
    )


def run(command: TrainCommand, args: DrafterTrainingArguments) -> None:
    """Train, fit the draft tree, and save the drafter with its record to `output_dir`; or only show what would be trained."""
    if command.show_masks is not None:
        _show_masks(command, command.show_masks)
        return
    if command.dry_run:
        _check_dry_run(args)
    resume = None if command.dry_run else resume_point(args)
    set_seed(args.seed)
    read = {
        name: read_training_data(paths, command.limit, command.forbid) for name, paths in _sources(command).items()
    }
    target, tokenizer = load_target(command.target, command.target_dtype, "cpu")  # the Trainer moves it
    data = {name: encode(part, tokenizer, command.max_length) for name, part in read.items()}
    drafter = fresh_drafter(command, target, data["train"])
    if command.dry_run:
        estimate = estimate_run(
            target, drafter, data["train"], args, tokenizer.pad_token_id, command.cache_features is not None
        )
        print_dry_run(estimate, target, drafter, data["train"].coverage, command.cache_features)
        return
    train_data: Any = data["train"]
    if command.cache_features is not None:
        features = objective_of(drafter).read_target(drafter, target)
        drafter.to(args.device)  # type: ignore[arg-type]  # a decorator hides the signature
        target.to(args.device)  # type: ignore[arg-type]
        train_data = FeatureCache(data["train"], features, command.cache_features)
    trainer = DrafterTrainer(
        target=target,
        model=drafter,
        args=args,
        train_dataset=train_data,
        eval_dataset=data.get("eval"),
        data_collator=ConversationCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
    )
    _train(trainer, resume, command)


def _train(trainer: DrafterTrainer, resume: str | None, command: TrainCommand) -> None:
    """Train, judge, and save what came out."""
    start = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=resume)
    except KeyboardInterrupt:
        logger.warning("Interrupted. Go on from the newest checkpoint with `--resume_from_checkpoint true`.")
        raise
    seconds = time.perf_counter() - start
    if trainer.eval_dataset is not None:
        _judge(trainer)
    if trainer.is_world_process_zero():
        args, drafter = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
        record = provenance(
            seed=args.seed, data=_sources(command), train_seconds=seconds, num_resumed=int(resume is not None)
        )
        record |= {"num_examples": len(trainer.train_dataset), "curve": trainer.state.log_history}  # type: ignore[arg-type]
        with writing_to(args.output_dir):
            save(drafter, Path(args.output_dir), command.save_bf16)
            if drafter.can_generate():  # a model in its own right, used with a tokenizer beside it
                trainer.processing_class.save_pretrained(args.output_dir)  # type: ignore[union-attr]
            (Path(args.output_dir) / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def encode(data: ConversationSet, tokenizer: PreTrainedTokenizerBase, max_length: int) -> ConversationDataset:
    """The conversations as tokens; each example knows the line it comes from."""
    return ConversationDataset(data.rows, tokenizer, max_length, data.origins)


def _check_dry_run(args: DrafterTrainingArguments) -> None:
    """Refuse to estimate the rest of a run: what is left of it is not looked at."""
    if args.resume_from_checkpoint is not None:
        raise OptionError(
            "`--dry_run` estimates a whole run, but `--resume_from_checkpoint` asks for the rest of one. Leave it out."
        )


def _show_masks(command: TrainCommand, num_examples: int) -> None:
    """Show what counts in the loss; of the target only the tokenizer is needed."""
    if command.dry_run:
        raise OptionError("`--show_masks` and `--dry_run` each do one thing, but both are given. Give one of them.")
    if num_examples < 1:
        raise OptionError(f"`--show_masks` takes a number of examples of at least 1, but it is {num_examples}.")
    _, tokenizer = read_config(command.target)
    data = read_training_data(command.data, command.limit, command.forbid)
    show_masks(encode(data, tokenizer, command.max_length), tokenizer, num_examples)


def fresh_drafter(command: TrainCommand, target: PreTrainedModel, data: ConversationDataset) -> PreTrainedModel:
    """An untrained drafter; one with a small vocabulary drafts what the assistant says most often in `data`."""
    drafter = METHODS[command.method](target, **config_fields(command.drafter_config))
    if isinstance(drafter, EagleDrafter) and drafter.config.has_own_vocabulary:
        config = drafter.config
        drafter.set_draft_vocabulary(most_frequent_tokens(data.examples, config.vocab_size, config.num_draft_tokens))
    return drafter


def _judge(trainer: DrafterTrainer) -> None:
    """Measure what the drafter has learnt on the evaluation data, and fit its draft tree, where it has one, to that."""
    if trainer.objective.has_draft_tree:
        logger.info("Draft tree fitted to the evaluation data: %s", trainer.fit_draft_tree().to_json())
    else:
        trainer.evaluate()


def _sources(command: TrainCommand) -> dict[str, list[str]]:
    return {"train": command.data, **({"eval": command.eval_data} if command.eval_data else {})}


def config_fields(entries: list[str]) -> dict[str, Any]:
    """Fields of a config from `NAME=VALUE`; a value is JSON (`3`, `true`, `[0, -1]`) where it can be read so, else a string.

    Raises:
        [`OptionError`]: an entry without `=`.
    """
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


def resume_point(args: DrafterTrainingArguments) -> str | None:
    """The checkpoint to go on from: the newest whole one for `true`, the given one, or none.

    Raises:
        [`OptionError`]: the output folder holds checkpoints and nothing says whether to go on, or the given one is not whole.
    """
    newest = newest_whole_checkpoint(args.output_dir)
    wish = args.resume_from_checkpoint
    if wish is None or str(wish).lower() == "false":
        if newest is not None and wish is None:
            raise OptionError(
                f"`{args.output_dir}` holds `{Path(newest).name}` of an earlier run. Go on with "
                "`--resume_from_checkpoint true`, or choose another `--output_dir`."
            )
        return None
    if str(wish).lower() == "true":
        return newest
    if not is_whole(Path(wish)):
        raise OptionError(f"`--resume_from_checkpoint` must be `true` or a whole checkpoint, but `{wish}` is none.")
    return str(wish)


def save(drafter: PreTrainedModel, folder: Path, in_bf16: bool) -> None:
    """Save the drafter; `in_bf16` halves the file, and the config still says float32, so that it loads so."""
    if in_bf16:
        drafter.bfloat16()
    drafter.save_pretrained(folder)
    if in_bf16:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "dtype": "float32"}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
