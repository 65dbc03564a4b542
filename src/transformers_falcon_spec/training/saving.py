"""Saving and publishing what a `DrafterTrainer` trained: every folder has its record, every repository its card."""

import json
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from ..drafters.base import DrafterModel
from ..drafters.checkpoint import let_others_read
from ..drafters.fingerprint import record_target
from ..drafters.registry import resolved
from ..errors import OptionError, TrainingError
from ..provenance import provenance
from .checkpoints import explain_write_errors, seal
from .dataset import usual_length
from .throughput import Throughput

RECORD = "training.json"


class SavingTrainer(Trainer):
    """A Trainer that publishes drafters as `falcon-spec publish` does, however it is asked to."""

    drafter: Any
    template_kwargs: Mapping[str, Any]
    throughput: Throughput
    start_seconds: float  # of the training, by `time.perf_counter`

    def check_hub_options(self) -> None:
        """Check, before anything is trained, that what the arguments ask to push can be published."""
        if not self.args.push_to_hub:
            return
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            raise OptionError(
                "`hub_strategy` must be `end` or `every_save`, but it is "
                f"`{self.args.hub_strategy}`: what is published are drafters, not the optimiser's state."
            )
        resolved(".hub.card:check_target_name")(getattr(self.drafter.config, "target_name_or_path", None))

    @cached_property
    def trained_length(self) -> int:
        """The length in tokens that nearly all of the training data keep to: [`~training.dataset.usual_length`]."""
        data: Any = self.train_dataset or ()
        data = getattr(data, "conversations", data)
        return usual_length(data.lengths if hasattr(data, "lengths") else [len(row["input_ids"]) for row in data])

    def record_in_config(self, target: PreTrainedModel) -> None:
        """Write into the drafter's config which target it is trained for, and how far it learns to look back."""
        config, conversations = self.drafter.config, getattr(self.train_dataset, "conversations", None)
        known = getattr(conversations, "template_kwargs", self.template_kwargs)
        record_target(config, target, self.processing_class, known)
        if isinstance(self.drafter, DrafterModel) and self.drafter.has_window and config.sliding_window is None:
            config.sliding_window = self.trained_length or None

    def record(self) -> dict[str, Any]:
        """The facts about the run that are saved with the drafter and shown on its card."""
        data: Any = self.train_dataset or ()
        logged = (row["train_runtime"] for row in reversed(self.state.log_history) if "train_runtime" in row)
        return {
            **provenance(seed=self.args.seed, device=self.args.device),
            "num_examples": len(getattr(data, "conversations", data)),
            "trained_length": self.trained_length,
            **getattr(getattr(data, "conversations", None), "facts", {}),
            "train_seconds": next(logged, time.perf_counter() - self.start_seconds),  # it is logged at the end
            "num_trained": self.get_num_trainable_parameters(),
            "curve": self.state.log_history,
        }

    def run_settings(self) -> dict[str, Any]:
        """What must stay the same when the run is resumed."""
        raise NotImplementedError

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights as the Trainer does; what cannot be loaded is refused in words."""
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except (RuntimeError, ValueError, OSError, EOFError, SafetensorError, UnpicklingError) as error:
            raise TrainingError(
                f"`{resume_from_checkpoint}` must hold the weights of this drafter, but they cannot be loaded: "
                f"{' '.join(str(error).split())[:300]} Give the options that the run began with, or take an earlier "
                "checkpoint."
            ) from error

    def _check_weights(self) -> None:
        """Stop where weights are no longer good enough to be saved."""
        raise NotImplementedError

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as the Trainer does, after checking the weights; a failed write is explained."""
        with self.throughput.timed("pause"):
            self._check_weights()
            with explain_write_errors(str(self.args.output_dir)):
                super()._save_checkpoint(*args, **kwargs)
                self.accelerator.wait_for_everyone()  # each process writes files of its own
                folder = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                if self.is_world_process_zero() and folder.is_dir():
                    let_others_read(folder)
                    seal(folder, self.run_settings())

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save as the Trainer does, with the record of the run."""
        super()._save(output_dir, state_dict)
        let_others_read(output_dir or str(self.args.output_dir))
        if self.args.should_save and self.state.global_step:
            folder = Path(output_dir or str(self.args.output_dir))
            (folder / RECORD).write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Publish a checkpoint that was just saved, unless only the end of the run is to be published."""
        if self.is_world_process_zero() and self.args.hub_strategy != HubStrategy.END:
            self._publish(Path(checkpoint_folder))

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
            **published: `private`, and the fields of [`Publication`], such as `target` and `about`.

        Returns:
            `str`: the id of the commit; None on all processes but the first.

        Raises:
            [`PublishError`]: the target has no name on the Hub, or the Hub refuses.
        """
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        return self._publish(Path(str(self.args.output_dir)), token=token, revision=revision, **published)

    def _publish(self, folder: Path, **options: Any) -> str:
        args = self.args
        asked = {"token": args.hub_token, "revision": args.hub_revision, "private": args.hub_private_repo}
        asked["target"] = self.drafter.config.target_name_or_path
        options = {**asked, **{name: value for name, value in options.items() if value is not None}}
        if self.hub_model_id is None:
            args.hub_private_repo = options["private"]  # not every version takes it as an argument
            self.init_hf_repo(token=options["token"])
        return str(resolved(".hub.publish:push_folder")(folder, self.hub_model_id, **options))
