"""Which arguments a chat template knows, whether its target thinks, and what is said where a switch was not given."""

from typing import Any

import pytest

from tests.chat import make_tokenizer
from tests.chat_families import FAMILIES, family_tokenizer
from transformers_falcon_spec.errors import OptionError, TrainingError
from transformers_falcon_spec.training.chat_template import (
    ChatTemplate,
    ask_for_switch,
    check_template_kwargs,
    names_in,
)

KNOWN = {
    "qwen2.5": {"tools"},
    "qwen3": {"enable_thinking"},
    "llama3": {"tools", "date_string"},
    "gpt-oss": {"reasoning_effort"},
    "glm": {"enable_thinking"},
}
MESSAGES = [{"role": "user", "content": "one"}]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_knows_what_it_reads(name: str) -> None:
    arguments = {"tools", "enable_thinking", "date_string", "reasoning_effort", "thinking"}
    assert names_in(family_tokenizer(name)) & arguments == KNOWN.get(name, set())


def test_names_in_texts_and_fields_are_no_arguments() -> None:
    template = "{% if a is not defined %}{{ 'b' + message.c }}d{%- endif -%}{{ strftime_now(\"e\") ~ f }}"

    assert names_in(make_tokenizer(template)) & set("abcdef") == {"a", "f"}


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        ("qwen3", {"enable_thinkng": False}, "it does not read `enable_thinkng`"),
        ("llama3", {"a": 1, "b": 2, "tools": []}, "it does not read `a`, `b`"),
        ("chatml", {"enable_thinking": True}, "it does not read `enable_thinking`"),
    ],
)
def test_an_unknown_argument_is_refused(name: str, kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        check_template_kwargs(family_tokenizer(name), kwargs)
    with pytest.raises(OptionError, match=text):
        ChatTemplate(family_tokenizer(name), kwargs)


def test_a_tokenizer_without_a_template_knows_nothing() -> None:
    assert names_in(make_tokenizer(None)) == set()
    with pytest.raises(TrainingError, match="needs a chat template"):
        ChatTemplate(make_tokenizer(None))


@pytest.mark.parametrize(
    ("name", "kwargs", "example"),
    [
        ("qwen3", {}, "`--chat_template_kwargs '{\"enable_thinking\": false}'`"),
        ("gpt-oss", {}, '`--chat_template_kwargs \'{"reasoning_effort": "low"}\'`'),
        ("qwen3", {"enable_thinking": True}, None),
        ("llama3", {}, None),
    ],
)
def test_a_switch_that_was_not_given_is_asked_for_once(
    name: str, kwargs: dict[str, Any], example: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ask_for_switch(family_tokenizer(name), kwargs)

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (example is not None)
    assert example is None or example in said[0]


@pytest.mark.parametrize(
    ("name", "kwargs", "thinks"),
    [
        ("qwen3", {}, True),
        ("qwen3", {"enable_thinking": False}, False),
        ("deepseek-r1", {}, True),
        ("gpt-oss", {"reasoning_effort": "low"}, True),
        ("llama3", {}, False),
        ("mistral", {}, False),
    ],
)
def test_a_target_thinks_if_its_template_mentions_thoughts_and_none_switched_them_off(
    name: str, kwargs: dict[str, Any], thinks: bool
) -> None:
    assert ChatTemplate(family_tokenizer(name), kwargs).thinks == thinks


def test_arguments_reach_the_text_and_the_tokens() -> None:
    template = ChatTemplate(family_tokenizer("llama3"), {"date_string": "1 May"})

    assert "Today: 1 May" in template.text(MESSAGES)
    assert template.ids(template.text(MESSAGES)) == template.encoded(MESSAGES)["input_ids"]
