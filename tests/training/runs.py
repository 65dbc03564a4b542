"""Short runs of the real Trainer on a tiny target."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, set_seed

from tests.chat import make_rows, make_tokenizer
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.dataset import ConversationCollator, ConversationDataset
from transformers_falcon_spec.training.objectives.falcon import FalconObjective
from transformers_falcon_spec.training.trainer import DrafterTrainer

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 4, "eval_decode_prompts": 0}
SHORT = {"max_steps": 12, "per_device_train_batch_size": 4, "save_strategy": "no", "learning_rate": 1e-2}


def make_dataset(num_rows: int, seed: int = 0) -> ConversationDataset:
    return ConversationDataset(make_rows(num_rows, seed=seed), make_tokenizer(), 64)


def make_trainer(
    folder: Path,
    drafter_options: dict[str, Any] | None = None,
    train_dataset: Any = None,
    make: Callable[..., Any] = make_drafter,
    make_target_of_run: Callable[[], Any] = lambda: make_target(**SMALL),
    **options: Any,
) -> DrafterTrainer:
    """A trainer with 20 conversations to learn from and 6 for evaluation; `options` go to its arguments.

    `make_target_of_run` makes the target, and `make` the drafter of that and of `drafter_options`.
    """
    set_seed(0)
    target = make_target_of_run()
    drafter = make(target, **(drafter_options or {})).train()
    return DrafterTrainer(
        target=target,
        model=drafter,
        args=DrafterTrainingArguments(str(folder), **{**QUIET, **SHORT, **options}),
        train_dataset=make_dataset(20) if train_dataset is None else train_dataset,
        eval_dataset=make_dataset(6, seed=1),
        data_collator=ConversationCollator(0),
        processing_class=make_tokenizer(),
    )


@torch.no_grad()
def large_features() -> PreTrainedModel:
    """A target of the scales of SmolLM2-135M: its features have an rms of 2, its embeddings, and with them its head, 0.12."""
    target = make_target(tie_word_embeddings=True)
    target.model.norm.weight.fill_(2.0)
    embeddings = target.get_input_embeddings().weight
    embeddings.mul_(0.12 / embeddings.pow(2).mean().sqrt())
    return target


def loss_curve(trainer: DrafterTrainer) -> list[float]:
    """The losses that were logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@contextmanager
def still_phases() -> Iterator[None]:
    """Blocks of Falcon drafters all start at one phase; each process draws those of its own rows otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FalconObjective, "phases", lambda _self, count, _generator: torch.zeros(count, dtype=torch.long))
        yield


def weights(trainer: DrafterTrainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether all weights are equal, bit for bit."""
    return one.keys() == other.keys() and all(value.equal(other[name]) for name, value in one.items())


def example_batch(num_rows: int = 3, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(6, 90, (num_rows, 14), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(14).expand(num_rows, -1) > 3
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "assistant_mask": mask}
