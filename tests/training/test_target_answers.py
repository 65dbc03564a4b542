"""Answers of a target in this process, whatever its tokenizer and its generation config leave out or ask for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.chat import make_rows, make_tokenizer
from tests.tiny import make_target
from tests.training.runs import SMALL
from transformers_falcon_spec.training.answers import (
    Prompt,
    TargetAnswerer,
)
from transformers_falcon_spec.training.chat_template import ChatTemplate
from transformers_falcon_spec.training.options import RegenerateOptions

pytestmark = pytest.mark.training

ENDS = [2, *range(6, 45)]
GREEDY = RegenerateOptions(max_new_tokens=14, temperature=0.0)


def small_target(**generation: Any) -> PreTrainedModel:
    target = make_target(**SMALL).double()
    target.generation_config.eos_token_id = ENDS
    for name, value in generation.items():
        setattr(target.generation_config, name, value)
    return target


def prompts(num_rows: int = 9) -> list[Prompt]:
    texts = [row[0]["content"] for row in make_rows(num_rows)]
    return [Prompt([], text, make_tokenizer()(text)["input_ids"]) for text in texts]


def answers(target: PreTrainedModel, tokenizer: Any = None, options: RegenerateOptions = GREEDY) -> list[Any]:
    return list(TargetAnswerer(target, ChatTemplate(tokenizer or make_tokenizer())).answer(prompts(), options, seed=0))


def alone(target: PreTrainedModel) -> list[str]:
    """The greedy answer of one call of `generate` to each prompt."""
    found = []
    for prompt in prompts():
        ids = target.generate(torch.tensor([prompt.ids]), do_sample=False, max_new_tokens=14)[0, len(prompt.ids) :]
        found.append(make_tokenizer().decode(ids, skip_special_tokens=True))
    return found


def test_a_tokenizer_without_a_pad_token_changes_no_answer() -> None:
    bare = make_tokenizer()
    bare.pad_token = None

    assert answers(small_target(pad_token_id=None), bare) == answers(small_target())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
    ],
)
def test_what_a_generation_config_asks_for_beside_one_text_changes_no_answer(name: str, value: Any) -> None:
    assert answers(small_target(**{name: value})) == answers(small_target())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_new_tokens", 7),
        ("exponential_decay_length_penalty", (4, 3.0)),
        ("begin_suppress_tokens", list(range(6, 45))),
        ("forced_eos_token_id", 2),
        ("use_cache", False),
        ("repetition_penalty", 1.5),
    ],
)
def test_new_tokens_are_counted_from_the_start_of_an_answer(name: str, value: Any) -> None:
    target = small_target(**{name: value})

    assert [reply.text for reply in answers(target)] == alone(target)


def test_a_stop_string_ends_its_row_alone() -> None:
    plain = answers(small_target())
    stop = next(reply.text[1] for reply in plain if len(reply.text) > 2)

    found = answers(small_target(stop_strings=[stop]))

    assert 0 < sum(one != other for one, other in zip(found, plain, strict=True)) < len(plain)
    for one, other in zip(found, plain, strict=True):
        assert other.text.startswith(one.text)
        assert one.is_complete == (other.is_complete or stop in one.text)


def test_a_changed_weight_is_another_target(tmp_path: Path) -> None:
    target, template = small_target(), ChatTemplate(make_tokenizer())
    before = TargetAnswerer(target, template).settings
    with torch.no_grad():
        target.get_input_embeddings().weight[0, 0] += 1

    assert TargetAnswerer(target, template).settings != before
