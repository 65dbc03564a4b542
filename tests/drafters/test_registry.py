"""Every drafting method is known by one entry: to `AutoModel`, to training, to conversion and to cards."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, MODEL_MAPPING, LlamaConfig, LlamaForCausalLM

from tests.tiny import make_target
from transformers_falcon_spec import (
    DrafterConfig,
    DrafterModel,
    EagleDrafter,
    FalconSpecConfig,
    FalconSpecDrafter,
    OptionError,
    register_drafter,
)
from transformers_falcon_spec.convert import FORMATS
from transformers_falcon_spec.drafters.registry import METHODS, DraftingMethod, method_of, resolved
from transformers_falcon_spec.training.objectives import STOCK_METHODS, Objective
from transformers_falcon_spec.training.recipes import RECIPES


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_automodel_finds_the_drafters_of_every_method(method: DraftingMethod) -> None:
    config_class = CONFIG_MAPPING[method.model_type]

    assert config_class is method.drafter.config_class
    assert MODEL_MAPPING[config_class] is method.drafter


@pytest.mark.parametrize(
    "method", [method for method in METHODS.values() if method.objective], ids=lambda each: each.name
)
def test_what_a_method_names_by_a_string_is_there(method: DraftingMethod) -> None:
    assert issubclass(resolved(method.objective), Objective)


def test_every_format_becomes_a_drafter_of_a_known_method_and_has_a_name_of_its_own() -> None:
    drafters = {method.drafter for method in METHODS.values()}

    assert {table.drafter for table in FORMATS} <= drafters
    assert len({table.name for table in FORMATS}) == len(FORMATS)


def test_recipes_are_those_of_methods_that_can_be_trained() -> None:
    trainable = {name for name, method in METHODS.items() if method.objective} | {*STOCK_METHODS}

    assert {method for recipes in RECIPES.values() for method in recipes} <= trainable


def test_a_method_is_told_by_its_drafter() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    drafter = FalconSpecDrafter(FalconSpecConfig(vocab_size=50, **sizes))
    other = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=1, **sizes))

    assert method_of(drafter) is METHODS["falcon"]
    assert method_of(other) is None


@pytest.mark.parametrize(
    ("name", "drafter"),
    [("falcon", EagleDrafter), ("another", type("OtherDrafter", (EagleDrafter,), {"config_class": FalconSpecConfig}))],
    ids=["name", "model_type"],
)
def test_what_is_taken_cannot_be_taken_again(name: str, drafter: Any) -> None:
    before = dict(METHODS)

    with pytest.raises(OptionError, match=re.escape("that of `FalconSpecDrafter`. Choose another name")):
        register_drafter(name, drafter, "Other")

    assert before == METHODS


class WeightlessConfig(DrafterConfig):
    model_type = "weightless"


class WeightlessDrafter(DrafterModel):
    config_class = WeightlessConfig


def test_a_drafter_without_weights_is_refused_in_words(tmp_path: Path) -> None:
    target = make_target()
    drafter = WeightlessDrafter.from_target(target)

    for use in (lambda: drafter.check_target(target), lambda: drafter.save_pretrained(tmp_path)):
        with pytest.raises(OptionError, match=r"a `WeightlessDrafter` has none. Give it one: `self.marker"):
            use()
