"""Distilling a drafter from its frozen target with `transformers.Trainer`.

`DrafterTrainer` has a loss and metrics of its own; everything else (devices, accumulation, checkpoints, resuming,
reporters) is the Trainer's.
"""

import json
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments, set_seed
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, PredictionOutput, unwrap_peft_model

from ..core.stats import GenerationStats
from ..core.tree import DraftTree
from ..drafters.base import DrafterModel
from ..drafters.checkpoint import let_others_read
from ..drafters.config_fields import context_of
from ..drafters.fingerprint import record_target
from ..drafters.registry import resolved
from ..errors import OptionError, TrainingError
from ..provenance import portable, provenance
from .arguments import DrafterTrainingArguments
from .conversations import prepared
from .dataset import ConversationCollator, SeededLengthGroups, survey, usual_length
from .features import move_target
from .metrics import (
    MAX_RANK,
    accuracy_metrics,
    check_target_can_verify,
    count_ranks,
    decoding_copy,
    decoding_metrics,
    decoding_stats,
    held_out_prompts,
    rank_shares,
)
from .objectives import Objective, Outcome, objective_of
from .recipes import make_drafter, recipe_of

logger = logging.getLogger(__name__)

RECORD = "training.json"


class DrafterTrainer(Trainer):
    """Trains a drafter on the features and distributions of its frozen target.

    Args:
        target ([`~transformers.PreTrainedModel`]):
            The target. It is not trained, and is moved to the device of the training unless `device_map` spread it
            over several.
        model ([`~transformers.PreTrainedModel`], `peft.PeftModel` or `str`):
            The drafter, of a kind with an objective (`register_drafter`); of a `PeftModel` only the adapter is
            trained. A string is the method of a fresh one, made by the default recipe.
        args ([`DrafterTrainingArguments`], *optional*):
            Options of the training; by default those of the recipe if `model` is a string.
        train_dataset (`Dataset`, *optional*):
            Conversations, as `datasets.load_dataset` gives them, under `messages`; or rows of `input_ids` and
            `assistant_mask`, which is 1 where the assistant speaks.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): The same to evaluate on; several by name.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The target's tokenizer, which conversations need.
        template_kwargs (`dict`, *optional*): Arguments for the chat template, such as `{"enable_thinking": False}`.
        kwargs: The other arguments of `transformers.Trainer`, except `compute_metrics` and `compute_loss_func`.

    Besides the loss and accuracies on the given text, `evaluate` measures decoding: the processes share
    `args.eval_decode_prompts` prompts of the evaluation data, which are continued by `target.generate(...,
    assistant_model=drafter)`. With FSDP or DeepSpeed no process holds the complete drafter, so
    these metrics are left out, with a warning.

    The drafter's config records which target it was trained for, including the chat template if `processing_class` is
    its tokenizer. A loss or a gradient that is not finite stops the run.

    Raises:
        [`DrafterMismatchError`]: the drafter does not fit the target.
        [`OptionError`]: there is no objective for this drafter, or several processes have a target that is spread.
        [`TrainingError`]: the data have no masks; from `train` and `evaluate`: the loss of a step is not finite.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer
    >>> target = AutoModelForCausalLM.from_pretrained("models/reference-target")
    >>> tokenizer = AutoTokenizer.from_pretrained("models/reference-target")
    >>> turns = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "5"}]
    >>> trainer = DrafterTrainer(target=target, train_dataset=[{"messages": turns}], processing_class=tokenizer)
    >>> type(trainer.model).__name__
    'FalconSpecDrafter'

    ```
    """

    loss_is_scaled_for_ga = True  # by the tokens of all batches of a step
    args: DrafterTrainingArguments

    def __init__(
        self,
        *,
        target: PreTrainedModel,
        model: PreTrainedModel | str = "falcon",
        args: TrainingArguments | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        checked = _checked(args, kwargs)
        checked.max_length = min(checked.max_length, context_of(target.config) or checked.max_length)

        tokenizer = kwargs.get("processing_class")
        self.template_kwargs = template_kwargs or {}
        kwargs["train_dataset"] = _the_only_one(kwargs.get("train_dataset"))
        for name in ("train_dataset", "eval_dataset"):
            data = kwargs.get(name)
            data = [data] if isinstance(data, str) else data  # a file, and not a name among several
            kwargs[name] = prepared(data, tokenizer, checked.max_length, template_kwargs)

        if isinstance(model, str):
            recipe = recipe_of("default", model)
            set_seed(checked.seed)  # before the weights are drawn
            model = make_drafter(model, target, kwargs["train_dataset"], recipe)
            if args is None:
                recipe.apply(checked, (), getattr(model.config.get_text_config(), "hidden_size", None))

        self.drafter = unwrap_peft_model(model)
        _check_fit(checked, self.drafter)
        objective = objective_of(self.drafter)
        self.features = objective.read_target(self.drafter, target)
        kwargs.setdefault("data_collator", ConversationCollator(getattr(tokenizer, "pad_token_id", None)))
        super().__init__(model=model, args=checked, compute_metrics=accuracy_metrics, **kwargs)
        self.model_accepts_loss_kwargs = True  # so that older Trainers do not divide the loss either

        move_target(target, self.args)
        self.objective: Objective = objective(self.drafter, self.features, self.args)
        self._decodes = self._can_decode()

        self._sums: dict[str, float] = {}  # of the terms of losses since the last log
        self._sum_shares = 0.0  # of the batches in those sums
        self._micro_step = (-1, 0)  # global step, and batches read in it
        self._stand_in: dict[str, Tensor] = {}  # a batch with something to draft, read where another has nothing
        self._eval_sums = torch.zeros(2, dtype=torch.float32)  # of losses times weights, and of weights
        self._survey(self.train_dataset, "the training data", self.args.train_batch_size)
        self._survey(self.eval_dataset, "the evaluation data", self.args.eval_batch_size)

    def _can_decode(self) -> bool:
        is_wanted = self.args.eval_decode_prompts > 0
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if is_wanted and is_sharded:
            logger.warning("No `acceptance_length` in evaluation: no process holds the whole drafter.")

        return is_wanted and not is_sharded

    # Data

    def _survey(self, data: Any, what: str, batch_size: int) -> None:
        """Look at all rows of the data before the first step: [`survey`]; a batch that can be drafted is kept."""
        if isinstance(data, Mapping):
            for name, part in data.items():
                self._survey(part, f"{what} `{name}`", batch_size)
        elif data is not None:
            num_rows = batch_size * self.args.world_size
            if self.args.dataloader_drop_last and len(data) < num_rows:
                raise TrainingError(
                    f"With `dataloader_drop_last` {what} must fill a batch of {num_rows} rows, but they have "
                    f"{len(data)}. Leave the option out, or make batches smaller."
                )

            row = survey(data, self.features.target, self.features.distance, what)
            self._stand_in = self._prepare_inputs(self.data_collator([data[row]]))

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The Trainer's sampler, except that batches of similar lengths depend on seed and epoch only."""
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)

        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        data: Any = train_dataset or self.train_dataset
        num_rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return SeededLengthGroups(num_rows, data.lengths, lambda: seed + int(self.state.epoch or 0))

    # A run

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; True goes on from the newest whole checkpoint in the folder."""
        if self._decodes and self.eval_dataset is not None:
            check_target_can_verify(self.drafter, self.features.target)

        self.record_in_config(self.features.target)
        if self.args.push_to_hub:  # what cannot be published is refused before anything is trained
            resolved(".hub.card:check_target_name")(getattr(self.drafter.config, "target_name_or_path", None))

        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(str(self.args.output_dir))
            if resume_from_checkpoint is None:
                raise TrainingError(f"`{self.args.output_dir}` holds no checkpoint to go on from.")

        schedule = Path(resume_from_checkpoint or "", SCHEDULER_NAME)
        if resume_from_checkpoint and not (self.is_deepspeed_enabled or schedule.is_file()):
            raise TrainingError(
                f"`{resume_from_checkpoint}` must hold optimizer and schedule, which `save_only_model` "
                f"leaves out, but it has no `{SCHEDULER_NAME}`. Train its drafter further in a new run."
            )

        self.start_seconds = time.perf_counter()
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # The loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Outcome]:
        """The loss of one batch, from the drafter's objective: a mean, or the batch's share of that of a step."""
        weight = self._weight(inputs)
        if not weight:  # the model is called in any case, for several processes wait for one another
            inputs = self._stand_in

        pairs = self.features(inputs)
        progress = self.state.global_step / max(self.state.max_steps, 1)
        outcome = self.objective(model, pairs, self._generator(model.training), progress)
        loss = outcome.loss
        if not loss.isfinite():
            raise self._not_finite(f"the loss is {loss.item()}")

        share = float(bool(weight))
        if model.training:
            if num_items_in_batch is not None:  # of all processes, whose gradients are averaged
                share = weight * self.args.world_size / max(float(num_items_in_batch), 1.0)

            self._sum_shares += share
            for name, term in outcome.terms.items():
                self._sums[name] = self._sums.get(name, 0.0) + share * term.item()

        return (loss * share, outcome) if return_outputs else loss * share

    def _weight(self, batch: dict[str, Tensor]) -> int:
        """How much a batch weighs in the mean over several."""
        return self.objective.weight(self.features.counted(batch))

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        """What all batches of a step weigh together, on all processes."""
        total = sum(map(self._weight, batch_samples))
        return self.accelerator.reduce(torch.tensor(float(total), device=device), "sum")

    def _generator(self, is_training: bool) -> torch.Generator:
        """A generator that depends on seed, step and process only, so that a resumed run draws the same numbers."""
        step, number = 0, 0  # of every batch of an evaluation
        if is_training:
            step = self.state.global_step
            previous, count = self._micro_step
            number = count + 1 if step == previous else 0
            self._micro_step = (step, number)

        key = ((self.args.seed * 1_000_003 + step) * 4_096 + number) * 1_024 + self.args.process_index
        return torch.Generator().manual_seed(key % (2**63))

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's gradient norm, checked so that a gradient that is not finite never reaches the weights."""
        norm = super()._get_grad_norm(*args, **kwargs)
        is_checked = norm is not None and self.accelerator.scaler is None  # a scaler skips such steps by itself
        if is_checked and not math.isfinite(float(norm)):
            raise self._not_finite(f"the norm of the gradient is {float(norm)}")

        return norm

    def _not_finite(self, what: str) -> TrainingError:
        """The error that stops the run after its last good step."""
        return TrainingError(
            f"Loss and gradient must stay finite numbers, but after step {self.state.global_step} {what}. Start anew "
            "with a lower `--learning_rate` or more `--warmup_steps`; if it happens at the first step, look at the "
            "target's dtype."
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does, with the means of the loss terms since the last log; only the record gets ranks."""
        told = {name: value for name, value in logs.items() if "_rank_" not in name}
        if self._sums and "loss" in logs:  # a process that had nothing to draft is waited for, too
            sums = torch.tensor([*self._sums.values(), self._sum_shares], device=self.args.device)
            *totals, shares = self.accelerator.reduce(sums, "sum").tolist()  # over all processes, as the loss
            for name, total in zip(self._sums, totals, strict=True):
                told[name] = total / shares if shares else 0.0

            self._sums = {}
            self._sum_shares = 0.0

        super().log(told, *args, **kwargs)
        self.state.log_history[-1] = {**logs, **self.state.log_history[-1]}

    # Evaluation

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as the Trainer does, and by decoding; the global random state stays as it is."""
        data = self._to_evaluate(eval_dataset)
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            return super().evaluate(data, *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Measure as `evaluate` does, on any data; the predictions are counts of guesses, a batch a row."""
        return super().predict(self._to_evaluate(test_dataset), *args, **kwargs)

    def _to_evaluate(self, data: Any) -> Any:
        """The data as they are read; a string is the name of one of several evaluation sets, or a file."""
        if isinstance(data, str):
            if isinstance(self.eval_dataset, Mapping) and data in self.eval_dataset:
                return data

            data = [data]

        data = prepared(data, self.processing_class, self.args.max_length, self.template_kwargs)
        self._survey(data, "the evaluation data", self.args.eval_batch_size)
        return data

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The Trainer's metrics, and those of decoding."""
        prefix = metric_key_prefix
        self._eval_sums = torch.zeros(2, dtype=torch.float32, device=self.args.device)
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, prefix)
        if output.metrics is None:
            return output

        loss, weight = self.accelerator.reduce(self._eval_sums, "sum").tolist()
        output.metrics[f"{prefix}_loss"] = loss / max(weight, 1.0)  # every token counts the same, in any batch
        if self._decodes:
            decoded = self._decode(dataloader.dataset, output.metrics, prefix)
            for name, value in decoding_metrics(decoded).items():
                output.metrics[f"{prefix}_{name}"] = value

        return output

    def _decode(self, data: Any, metrics: Mapping[str, float], prefix: str) -> GenerationStats:
        """Decode prompts of `data` with the present drafter; the processes share them."""
        args = self.args
        target = self.features.target
        longest = (context_of(target.config) or math.inf) - args.eval_decode_tokens
        prompts = held_out_prompts(data, args.eval_decode_prompts, longest)
        mine = prompts[args.process_index :: args.world_size]

        tree = self._best_tree(metrics, prefix) if self.objective.has_draft_tree else None
        drafter = decoding_copy(self.drafter, target, tree)
        measured = decoding_stats(target, drafter, mine, args.eval_decode_tokens, self.objective.generate_options)
        return sum(gather_object([measured]), GenerationStats())

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,  # noqa: ARG002  the Trainer passes it
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The loss, and the counts of [`count_ranks`]."""
        inputs = self._without_repeats(self._prepare_inputs(inputs))
        with torch.no_grad():
            loss, outcome = self.compute_loss(model, inputs, return_outputs=True)

        weight = self._weight(inputs)
        self._eval_sums += torch.stack([loss.detach().float() * weight, loss.new_tensor(float(weight)).float()])
        counts = count_ranks(outcome, self.objective.num_offsets) * bool(weight)
        return (loss.detach(), None, None) if prediction_loss_only else (loss.detach(), counts, counts[..., :1])

    def _without_repeats(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch, without words of the assistant in rows that are there a second time.

        All processes read as many batches, of as many rows: the last ones are filled up with the data's first rows.
        """
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return batch

        mask = batch["assistant_mask"]
        first = self.args.process_index * len(mask)
        is_first_time = torch.arange(first, first + len(mask), device=mask.device) < state.remainder
        return {**batch, "assistant_mask": mask & is_first_time[:, None]}

    def fit_draft_tree(self, metrics: Mapping[str, float] | None = None) -> DraftTree:
        """Fit the best static tree to the accuracies on the evaluation data, store it in the drafter, and return it.

        They come from `metrics` of an evaluation of these weights, or from a new one; of several evaluation sets they
        are the mean. The tree takes one pass of the drafter. With `draft_tree_nodes=0` the drafter is evaluated with
        its own tree and keeps it.

        Raises:
            [`TrainingError`]: the drafter has no such tree.
        """
        if not self.objective.has_draft_tree:
            raise TrainingError("`fit_draft_tree` needs a drafter with a static draft tree; this one drafts without.")

        sets = self.eval_dataset
        prefixes = [f"eval_{name}" for name in sets] if isinstance(sets, dict) else ["eval"]
        tree = self._best_tree(self.evaluate() if metrics is None else metrics, *prefixes)
        options = self.drafter.generation_config
        owner = self.drafter.config if options.draft_tree is None else options  # from which the drafter takes its tree
        if self.args.draft_tree_nodes:
            owner.draft_tree = tree.to_json()

        return tree

    def _best_tree(self, metrics: Mapping[str, float], *prefixes: str) -> DraftTree:
        if self.args.draft_tree_nodes == 0:
            return cast(DraftTree, self.drafter.draft_tree)

        num_ranks = min(MAX_RANK, self.objective.num_draftable_tokens)
        shares = [rank_shares(metrics, self.objective.num_offsets, num_ranks, prefix) for prefix in prefixes]
        return DraftTree.best_first(torch.stack(shares).mean(0), self.args.draft_tree_nodes)

    # What is written

    @cached_property
    def trained_length(self) -> int:
        """The length in tokens that nearly all of the training data keep to: [`~training.dataset.usual_length`]."""
        return usual_length(getattr(self.train_dataset, "lengths", ()))

    @property
    def _conversations(self) -> Any:
        """The training data without features, one conversation a row."""
        return getattr(self.train_dataset, "conversations", ())

    def record_in_config(self, target: PreTrainedModel) -> None:
        """Write into the drafter's config which target it is trained for, and how far it learns to look back.

        A window that a fresh drafter was made with stays. That of a saved one grows to what it is trained on now.
        """
        config = self.drafter.config
        known = getattr(self._conversations, "template_kwargs", self.template_kwargs)
        record_target(config, target, self.processing_class, known)
        if not isinstance(self.drafter, DrafterModel) or not self.drafter.has_window:
            return

        is_saved = bool(self.drafter.name_or_path)
        if config.sliding_window is None or is_saved:
            longest = max(config.sliding_window or 0, self.trained_length)
            config.sliding_window = longest or None

    def record(self) -> dict[str, Any]:
        """The facts about the run that are saved with the drafter and shown on its card."""
        logged = (row["train_runtime"] for row in reversed(self.state.log_history) if "train_runtime" in row)
        return {
            **provenance(seed=self.args.seed, device=self.args.device),
            "target": portable(getattr(self.drafter.config, "target_name_or_path", None)),
            "num_examples": len(self._conversations),
            "trained_length": self.trained_length,
            **getattr(self._conversations, "facts", {}),
            "train_seconds": next(logged, time.perf_counter() - self.start_seconds),  # it is logged at the end
            "num_trained": self.get_num_trainable_parameters(),
            "curve": self.state.log_history,
        }

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save as the Trainer does, with the record of the run."""
        super()._save(output_dir, state_dict)
        if not self.args.should_save:  # another process writes, maybe later
            return

        folder = Path(output_dir or str(self.args.output_dir))
        let_others_read(folder)
        if self.state.global_step:
            (folder / RECORD).write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing: a drafter is published when the run ends."""

    def push_to_hub(  # type: ignore[override]  # what is pushed is a drafter with its card
        self,
        commit_message: str | None = None,  # noqa: ARG002  the Trainer passes it
        blocking: bool = True,  # noqa: ARG002  the Trainer passes it
        token: str | None = None,
        revision: str | None = None,
        **published: Any,
    ) -> str | None:
        """Publish the drafter with its code and its card, as `falcon-spec publish` does.

        Args:
            commit_message (`str`, *optional*): For calls as of the Trainer's; every publication has the same.
            blocking (`bool`): For calls as of the Trainer's; this returns when the Hub has the commit.
            token (`str`, *optional*): An access token; None takes `args.hub_token`.
            revision (`str`, *optional*): A branch to commit to; None takes `args.hub_revision`.
            **published: The fields of [`Publication`], such as `target` and `about`.

        Returns:
            `str`: the id of the commit; None on all processes but the first.

        Raises:
            [`PublishError`]: the target has no name on the Hub, or the Hub refuses.
        """
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)

        commit = resolved(".hub.publish:publish")(
            Path(str(self.args.output_dir)),
            str(self.hub_model_id),
            resolved(".hub.card:Publication")(**published),
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            private=self.args.hub_private_repo,
        )
        return str(commit)


def newest_checkpoint(folder: str | Path) -> str | None:
    """The checkpoint of the highest step that was written to its end, or None if there is none."""
    by_step = {}
    for checkpoint in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = checkpoint.name.rpartition("-")[2]
        with suppress(OSError, json.JSONDecodeError):
            json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))  # which the Trainer writes last
            if step.isdigit():
                by_step[int(step)] = str(checkpoint)

    return by_step[max(by_step)] if by_step else None


def _checked(args: TrainingArguments | None, others: dict[str, Any]) -> DrafterTrainingArguments:
    """The arguments of a trainer, by default those of drafters; what it has no use for is refused."""
    if args is not None and not isinstance(args, DrafterTrainingArguments):
        raise OptionError(
            "`args` must be `DrafterTrainingArguments`, which have the options of `TrainingArguments` and the "
            f"defaults that drafters need, but they are `{type(args).__name__}`: make them of the same options."
        )

    for name in ("compute_loss_func", "compute_metrics"):
        if others.pop(name, None) is not None:
            raise OptionError(
                f"`{name}` must be left out, for loss and metrics are those of the kind of drafter. Write an "
                "objective (`register_drafter`) for a loss of your own, and measure in a callback."
            )

    return args or DrafterTrainingArguments()


def _check_fit(args: DrafterTrainingArguments, drafter: Any) -> None:
    """Refuse options that this kind of drafter cannot be trained with."""
    name = type(drafter).__name__
    if args.neftune_noise_alpha is not None and not drafter.can_generate():
        raise OptionError(
            f"`neftune_noise_alpha` must be left out, for it needs embeddings to train, but `{name}` has none. "
            "`feature_noise` is the noise on what it reads."
        )

    if args.gradient_checkpointing and not drafter.supports_gradient_checkpointing:
        raise OptionError(
            f"`gradient_checkpointing` must stay off for `{name}`, which cannot compute its layers a second time. "
            "Make batches smaller, and accumulate gradients."
        )


def _the_only_one(data: Any) -> Any:
    """The one data set to train on; a mapping may hold it by a name."""
    if not isinstance(data, Mapping):
        return data

    if len(data) > 1:
        raise TrainingError(
            f"`train_dataset` must be one data set, but it holds several: {sorted(data)}. Take one of them: "
            '`load_dataset(..., split="train")`.'
        )

    return next(iter(data.values()))
