"""What a run is given where the user says nothing: from target, data and device, and never over what was given."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chat import make_rows, make_tokenizer
from tests.tiny import make_prompt, make_target
from tests.training.runs import make_trainer
from transformers_falcon_spec import DiffusionDrafter, EagleDrafter, FalconSpecDrafter, MedusaDrafter
from transformers_falcon_spec.drafters.autoregressive import make_draft_model
from transformers_falcon_spec.drafters.dflash import make_dflash
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.chat_template import ChatTemplate
from transformers_falcon_spec.training.conversations import ConversationSet
from transformers_falcon_spec.training.objectives.falcon import FalconObjective
from transformers_falcon_spec.training.recipes import (
    MOST_STEPS,
    Device,
    bytes_of_row,
    held_out_rows,
    plan_length,
    plan_run,
)

pytestmark = pytest.mark.training

CPU = Device("cpu")
GIB = 2**30


def make_objective(folder: Path, **options: Any) -> FalconObjective:
    target = make_target(vocab_size=128)
    drafter = FalconSpecDrafter.from_target(target)
    args = DrafterTrainingArguments(str(folder), use_cpu=True, **options)
    return FalconObjective(drafter, FalconObjective.read_target(drafter, target), args)


def planned(folder: Path, num_rows: int = 80, device: Device = CPU, given: Any = (), **options: Any) -> Any:
    """The arguments after planning for rows of 100 tokens, and the plan by name."""
    objective = make_objective(folder, **options)
    choices = plan_run(objective, given, [100] * num_rows, device)
    return objective.args, {choice.what: choice for choice in choices}


@pytest.mark.parametrize(("num_rows", "steps"), [(1, 8), (80, 80), (16_000, MOST_STEPS), (160_000, 20_000)])
def test_steps_follow_from_the_data(tmp_path: Path, num_rows: int, steps: int) -> None:
    args, choices = planned(tmp_path, num_rows)

    assert args.max_steps == steps
    assert choices["steps"].value.startswith(f"{steps}, ")


def test_on_a_cpu_the_run_is_in_float32_and_reads_eight_rows_at_a_time(tmp_path: Path) -> None:
    args, choices = planned(tmp_path)

    assert (args.bf16, args.per_device_train_batch_size, args.gradient_accumulation_steps) == (False, 8, 1)
    assert choices["precision"].value == "float32"
    assert args.save_total_limit == 1


def test_on_a_gpu_the_run_is_in_bfloat16_if_it_has_that(tmp_path: Path) -> None:
    new, _ = planned(tmp_path, device=Device("cuda", 80 * GIB, has_bfloat16=True))
    old, choices = planned(tmp_path, device=Device("cuda", 80 * GIB))

    assert (new.bf16, new.mixed_precision) == (True, "bf16")
    assert not old.bf16
    assert choices["precision"].reason == "this GPU has no bfloat16"


@pytest.mark.parametrize(("free_rows", "batch", "times"), [(100, 8, 1), (7, 2, 4), (2, 1, 8), (0, 1, 8)])
def test_a_batch_takes_no_more_than_half_of_the_free_memory_and_a_step_stays_as_large(
    tmp_path: Path, free_rows: int, batch: int, times: int
) -> None:
    objective = make_objective(tmp_path)
    row_bytes = bytes_of_row(objective, 100)
    target_bytes = sum(weight.nbytes for weight in objective.features.target.parameters())

    args, _ = planned(tmp_path, device=Device("cuda", target_bytes + free_rows * row_bytes, has_bfloat16=True))

    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (batch, times)


@pytest.mark.parametrize("name", ["falcon", "eagle", "eagle3", "medusa", "ar", "dflash", "diffusion"])
def test_no_text_makes_more_guesses_than_the_plan_has_room_for(tmp_path: Path, name: str) -> None:
    makers: dict[str, Any] = {
        "falcon": FalconSpecDrafter.from_target,
        "eagle": EagleDrafter.from_target,
        "eagle3": partial(EagleDrafter.from_target, version=3),
        "medusa": partial(MedusaDrafter.from_target, num_heads=3),
        "ar": make_draft_model,
        "dflash": partial(make_dflash, block_size=3, target_layer_ids=[0]),
        "diffusion": partial(DiffusionDrafter.from_target, num_draft_tokens=3),
    }
    trainer = make_trainer(tmp_path, make=makers[name], ttt_steps=3, num_anchors=2)
    num_tokens = 40
    every = torch.ones(1, num_tokens, dtype=torch.long)
    batch = {"input_ids": make_prompt(num_tokens), "attention_mask": every, "assistant_mask": every.bool()}

    outcome = trainer.objective(trainer.drafter, trainer.features(batch), torch.Generator(), 0.0)

    room = trainer.objective.most_guesses(num_tokens)
    num_guesses = len(outcome.draft_logits) + (num_tokens - 1 if name == "diffusion" else 0)  # those of the text
    assert room / 2 < num_guesses <= room


def test_what_was_given_is_kept_and_said_to_be(tmp_path: Path) -> None:
    options = {"bf16": True, "per_device_train_batch_size": 3, "max_steps": 7, "save_total_limit": 5}

    args, choices = planned(tmp_path, given=options.keys(), device=Device("cuda", GIB), **options)

    assert {name: getattr(args, name) for name in options} == options
    assert args.gradient_accumulation_steps == 1
    assert [choices[name].reason for name in ("precision", "batch", "steps")] == ["as asked for"] * 3


def test_times_that_were_given_make_a_step_of_as_many_rows(tmp_path: Path) -> None:
    given = {"gradient_accumulation_steps": 4}

    args, choices = planned(tmp_path, given=given.keys(), **given)

    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert choices["batch"].value == "2 rows, 4 times a step"


@pytest.mark.parametrize(
    ("num_long", "context", "given", "length"),
    [
        (0, 4096, (), 512),
        (1, 4096, (), 512),
        (2, 4096, (), 1536),
        (2, 600, (), 600),
        (2, 64, (), 64),
        (2, 4096, ["max_length"], 30),
        (2, 20, ["max_length"], 20),
    ],
)
def test_examples_are_as_long_as_nearly_all_need(
    tmp_path: Path, num_long: int, context: int, given: Any, length: int
) -> None:
    args = DrafterTrainingArguments(str(tmp_path), max_length=30 if given else 512)
    long = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "one " * 700}]] * num_long
    unusable = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": 3}]]
    config = make_target(max_position_embeddings=context).config

    choice = plan_length(
        args, given, [*make_rows(20 - num_long), *long, *unusable], ChatTemplate(make_tokenizer()), config
    )

    assert args.max_length == length
    assert choice.value == f"{length} tokens"


def test_a_run_of_so_many_epochs_logs_twenty_times(tmp_path: Path) -> None:
    args, choices = planned(tmp_path, 800, given=["num_train_epochs"], num_train_epochs=3)

    assert (args.max_steps, args.logging_steps) == (-1, 15)
    assert choices["steps"].value == "300, 3.0 epochs"


@pytest.mark.parametrize(("num_rows", "count"), [(0, 0), (19, 0), (20, 1), (200, 10), (100_000, 64)])
def test_held_out_rows_are_a_few_and_spread(num_rows: int, count: int) -> None:
    rows = held_out_rows(num_rows)

    gaps = {after - before for before, after in pairwise(rows)}
    assert len(set(rows)) == count
    assert all(0 <= row < num_rows for row in rows)
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


def test_a_split_loses_no_conversation() -> None:
    rows = [[{"role": "user", "content": str(number)}] for number in range(5)]
    whole = ConversationSet(rows, [f"row {number}" for number in range(5)])

    rest, out = whole.split([1, 3])

    assert [part.rows for part in (rest, out)] == [[rows[0], rows[2], rows[4]], [rows[1], rows[3]]]
    assert out.origins == ["row 1", "row 3"]
    assert rest.reasons is whole.reasons


def test_the_facts_of_a_device_are_those_of_torch() -> None:
    assert Device.of(torch.device("cpu")) == CPU
