"""Prompt files: both shapes, the chat template, and errors with file and line."""

import json
from pathlib import Path

import pytest

from tests.chat import make_tokenizer
from transformers_falcon_spec.errors import ConversationError
from transformers_falcon_spec.evaluation.prompts import read_prompts


def test_both_shapes_give_the_last_user_turn(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    chat = {"id": "b", "messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "three"}]}
    path.write_text(json.dumps({"id": "a", "prompt": "one"}) + "\n" + json.dumps(chat) + "\n", encoding="utf-8")

    prompts = read_prompts([str(path)])

    assert [(p.set_name, p.prompt_id, p.text) for p in prompts] == [("sums", "a", "one"), ("sums", "b", "two")]


def test_the_chat_template_opens_the_assistants_turn(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps({"prompt": "one two"}), encoding="utf-8")
    tokenizer = make_tokenizer()

    ids = read_prompts([str(path)])[0].input_ids(tokenizer)

    assert tokenizer.decode(ids[0]) == "<user>one two</s><assistant>"


@pytest.mark.parametrize("line", ["{broken", "[]", '{"messages": [{"role": "assistant", "content": "x"}]}', "{}"])
def test_a_row_that_is_no_prompt_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"prompt": "one"}\n' + line + "\n", encoding="utf-8")

    with pytest.raises(ConversationError, match=r"sums\.jsonl, line 2: a prompt needs `prompt` or `messages`"):
        read_prompts([str(path)])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConversationError, match=r"The prompt file `nowhere\.jsonl` does not exist"):
        read_prompts(["nowhere.jsonl"])
