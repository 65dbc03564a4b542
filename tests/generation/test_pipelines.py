"""Pipelines of Transformers with a drafter from the start: as an object or by name, and as without this package after `disable`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline
from transformers.pipelines import base

from tests import runs
from tests.chat import make_tokenizer
from tests.doubles import InformedDrafter
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import FalconSpecDrafter, collect_speculation, disable, enable
from transformers_falcon_spec.errors import GenerationError

TEXT = "one two three"
OPTIONS = {"max_new_tokens": 24, "do_sample": False, "return_full_text": False}


@pytest.fixture(autouse=True)
def _enabled_again() -> Iterator[None]:
    yield
    enable()


def make_pipeline(target: Any, **options: Any) -> Any:
    return pipeline("text-generation", model=target, tokenizer=make_tokenizer(), device="cpu", **options)


def make_pair() -> tuple[Any, Any]:
    """A target, and a drafter whose special ids are not the target's, as after a training with another tokenizer's."""
    target = make_target().double()
    drafter = make_drafter(target, block_size=2)
    drafter.config.pad_token_id = 1
    return target, drafter


def test_a_drafter_is_taken_as_it_is_without_a_tokenizer_of_its_own() -> None:
    target, drafter = make_pair()
    prompt = make_tokenizer()(TEXT, return_tensors="pt").input_ids
    informed = InformedDrafter(drafter, runs.plain(target, prompt).sequences)
    plain = make_pipeline(target)(TEXT, **OPTIONS)

    for assistant in (informed, drafter):
        write = make_pipeline(target, assistant_model=assistant)
        with collect_speculation() as stats:
            assert write(TEXT, **OPTIONS) == plain
        assert [each.num_tokens for each in stats] == [24]
        assert assistant is not informed or stats[0].acceptance_length > 1


def test_a_drafter_is_loaded_by_its_path_in_the_type_and_on_the_device_of_the_target(tmp_path: Path) -> None:
    target, drafter = make_pair()
    drafter.save_pretrained(tmp_path)
    plain = make_pipeline(target)(TEXT, **OPTIONS)

    write = make_pipeline(target, assistant_model=str(tmp_path))
    with collect_speculation() as stats:
        assert write(TEXT, **OPTIONS) == plain

    loaded = write.assistant_model
    assert isinstance(loaded, FalconSpecDrafter)
    assert (loaded.dtype, loaded.device, loaded.training) == (target.dtype, target.device, False)
    assert stats[0].num_drafted > 0


def test_stock_assistants_are_loaded_as_ever(tmp_path: Path) -> None:
    target = make_target()
    make_target(seed=5, num_hidden_layers=1).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)

    write = make_pipeline(target, assistant_model=str(tmp_path))

    assert type(write.assistant_model) is type(target)
    assert write(TEXT, **OPTIONS) == make_pipeline(target)(TEXT, **OPTIONS)


def test_a_path_in_a_call_is_refused(tmp_path: Path) -> None:
    write = make_pipeline(make_target())

    with pytest.raises(
        GenerationError, match=r"must be a model that is loaded, but it is the name or path '.*'\. Load it first"
    ):
        write(TEXT, assistant_model=str(tmp_path), **OPTIONS)


def test_disabling_gives_pipelines_their_own_loader_back() -> None:
    wrapped = base.load_assistant_model

    disable()
    stock = base.load_assistant_model
    enable()
    enable()

    assert stock is wrapped.__wrapped__ is base.load_assistant_model.__wrapped__
    assert not hasattr(stock, "__wrapped__")
