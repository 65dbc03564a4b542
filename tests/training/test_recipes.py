"""Recipes: what they set, which options take precedence, and that all options exist."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import SchedulerType

from tests.tiny import make_target
from transformers_falcon_spec import FalconSpecConfig
from transformers_falcon_spec.commands.options import TRAIN_NOTES
from transformers_falcon_spec.errors import OptionError, TrainingError
from transformers_falcon_spec.training.arguments import DrafterTrainingArguments
from transformers_falcon_spec.training.dataset import USUAL_SHARE
from transformers_falcon_spec.training.recipes import (
    LENGTH_STEP,
    MEASURED_WIDTH,
    MOST_EPOCHS,
    MOST_STEPS,
    RECIPES,
    ROWS_PER_STEP,
    make_drafter,
    makers,
    recipe_of,
)

ALL = [(name, method) for name, methods in RECIPES.items() for method in methods]


def arguments(folder: Path) -> DrafterTrainingArguments:
    return DrafterTrainingArguments(str(folder), report_to="none", use_cpu=True)


@pytest.mark.parametrize(("name", "method"), ALL)
def test_a_recipe_sets_its_options_and_leaves_those_that_are_given(tmp_path: Path, name: str, method: str) -> None:
    recipe, args = recipe_of(name, method), arguments(tmp_path)
    args.warmup_steps = 7

    recipe.apply(args, {"warmup_steps"}, MEASURED_WIDTH)

    expected = {**recipe.training, "warmup_steps": 7}
    assert {option: getattr(args, option) for option in expected} == expected
    others = {field.name for field in fields(args)} - set(expected) - {"output_dir", "logging_dir"}
    assert all(getattr(args, option) == getattr(arguments(tmp_path), option) for option in others)


@pytest.mark.parametrize(("name", "method"), ALL)
def test_a_recipe_names_fields_of_the_drafter_and_values_of_the_right_kind(name: str, method: str) -> None:
    recipe = recipe_of(name, method)

    config = FalconSpecConfig(hidden_size=64, num_attention_heads=4, **recipe.drafter_config)

    assert {option: getattr(config, option) for option in recipe.drafter_config} == recipe.drafter_config
    assert isinstance(recipe.training["lr_scheduler_type"], SchedulerType)


@pytest.mark.parametrize(
    ("name", "width", "rate"),
    [("default", 256, 2e-3), ("default", 4096, 5e-4), ("paper", 64, 5e-4), ("paper", 4096, 5e-4)],
)
def test_the_measured_rate_falls_with_the_root_of_the_width_and_the_papers_stays(
    tmp_path: Path, name: str, width: int, rate: float
) -> None:
    args = arguments(tmp_path)

    recipe_of(name, "falcon").apply(args, (), width)

    assert args.learning_rate == pytest.approx(rate)


def test_a_warm_up_lasts_as_long_as_in_the_run_that_was_measured(tmp_path: Path) -> None:
    args = arguments(tmp_path)

    recipe_of("default", "falcon").apply(args, (), 256)

    assert (args.get_warmup_steps(8000), args.get_warmup_steps(20)) == (200, 1)


def test_a_method_that_the_default_does_not_name_keeps_its_defaults(tmp_path: Path) -> None:
    args = arguments(tmp_path)

    recipe_of("default", "eagle").apply(args, (), 64)

    assert args.to_dict() == arguments(tmp_path).to_dict()
    assert recipe_of("default", "eagle").drafter_config == {}


@pytest.mark.parametrize(
    ("name", "method", "text"),
    [
        ("paper", "medusa", "The recipe `paper` is one for `falcon`, but the method is `medusa`"),
        ("best", "falcon", r"`recipe` must be one of \['default', 'paper'\], but it is 'best'"),
    ],
)
def test_a_recipe_that_there_is_not_is_refused(name: str, method: str, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        recipe_of(name, method)


@pytest.mark.parametrize(("name", "method"), ALL)
def test_the_help_says_what_recipes_set_each_option_to(name: str, method: str) -> None:
    recipe = RECIPES[name][method]
    for option, value in recipe.training.items():
        assert f"{getattr(value, 'value', value)} ({name}, {method})" in TRAIN_NOTES[option]

    shown = [f"{field}={value}".lower() for field, value in recipe.drafter_config.items() if field != "draft_tree"]
    assert f"{' '.join(shown)} ({name}, {method})" in TRAIN_NOTES["drafter_config"]


def test_the_help_says_what_holds_without_a_recipe_and_what_the_plan_sets() -> None:
    for field in fields(DrafterTrainingArguments):
        note = TRAIN_NOTES.get(field.name, "")
        default = getattr(field.default, "value", field.default)
        assert "otherwise" not in note or note.endswith(f"otherwise {default}.")

    assert f"{MOST_EPOCHS} epochs, but no more than {MOST_STEPS} steps" in TRAIN_NOTES["max_steps"]
    assert f"{LENGTH_STEP}, or as many times that as leave {USUAL_SHARE:.0%}" in TRAIN_NOTES["max_length"]
    assert f"By default {ROWS_PER_STEP}, or fewer" in TRAIN_NOTES["per_device_train_batch_size"]
    assert f"what makes {ROWS_PER_STEP} rows a step" in TRAIN_NOTES["gradient_accumulation_steps"]
    assert f"One of {', '.join(sorted(makers()))}; " in TRAIN_NOTES["method"]


@pytest.mark.parametrize(("num_said", "size"), [(4000, 4096), (8000, 8192), (19_000, 16_384)])
def test_a_target_of_many_tokens_gets_a_list_of_those_that_its_answers_say(num_said: int, size: int) -> None:
    target = make_target(vocab_size=20_000, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    said = list(range(500, 500 + num_said))
    data = [{"input_ids": [7, 7, *said, 9], "assistant_mask": [0, 0, *[1] * num_said, 0]}]

    drafter = make_drafter("falcon", target, data, transition_rank=4)

    assert drafter.config.draft_vocab_size == size
    listed = set(drafter.draft_token_ids.tolist())
    assert len(listed & set(said)) == min(num_said, size)
    assert make_drafter("falcon", target, data, draft_vocab_size=None).draft_token_ids is None
    assert make_drafter("falcon", target, None).draft_token_ids is None
    assert len(make_drafter("eagle", target, data, draft_vocab_size=30).draft_token_ids) == 30


@pytest.mark.parametrize(
    ("method", "recipe", "grows", "num_repeated"),
    [
        ("falcon", "default", True, 10),
        ("falcon", "paper", False, 0),
        ("eagle", "default", True, 10),
        ("medusa", "default", False, 0),  # its kind has no branch of repeated text
    ],
)
def test_a_fresh_drafter_drafts_as_its_recipe_says(method: str, recipe: str, grows: bool, num_repeated: int) -> None:
    drafter: Any = make_drafter(method, make_target(), None, recipe_of(recipe, method))

    assert (drafter.is_tree_dynamic, drafter.num_text_tokens) == (grows, num_repeated)


def test_a_list_needs_answers() -> None:
    with pytest.raises(TrainingError, match="`train_dataset` must be given"):
        make_drafter("falcon", make_target(), None, draft_vocab_size=30)
