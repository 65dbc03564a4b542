"""Prompt files: both shapes, the chat template, and errors with file and line."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chat import make_tokenizer
from transformers_falcon_spec.errors import ConversationError
from transformers_falcon_spec.evaluation.prompts import check_lengths, read_prompts


def write(path: Path, *rows: Any) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_both_shapes_give_the_last_user_turn(tmp_path: Path) -> None:
    chat = {"id": 7, "messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "three"}]}
    path = write(tmp_path / "sums.jsonl", {"id": "a", "prompt": "one"}, "", chat, {"prompt": "four"})

    prompts = read_prompts([path])

    found = [(p.set_name, p.prompt_id, p.text) for p in prompts]
    assert found == [("sums", "a", "one"), ("sums", "7", "two"), ("sums", "4", "four")]


def test_prompts_are_read_in_the_forms_of_conversations(tmp_path: Path) -> None:
    rows = [
        {"prompt": "two"},
        {"question": "two", "answer": "three"},
        {"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "three"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "two"}]}]},
    ]
    path = tmp_path / "sums.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode("utf-8-sig")))

    found = read_prompts([str(path)])

    assert [(p.set_name, p.prompt_id, p.text) for p in found] == [("sums", f"{n}", "two") for n in (1, 2, 3, 4)]


def test_the_limit_holds_for_each_file(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", {"prompt": "one"}, {"prompt": "two"}) for name in ("a", "b")]

    assert [(p.set_name, p.text) for p in read_prompts(paths, limit=1)] == [("a", "one"), ("b", "one")]


def test_the_chat_template_opens_the_assistants_turn(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", {"prompt": "one two"})
    tokenizer = make_tokenizer()

    ids = read_prompts([path])[0].input_ids(tokenizer)

    assert tokenizer.decode(ids[0]) == "<user>one two</s><assistant>"


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "it must be JSON, but Expecting property name"),
        ('{"prompt": "one"} {"prompt": "two"}', "it must be JSON, but Extra data"),
        ([], "a row must be an object with a list `messages`, but it is `list`"),
        ({}, r"a row must hold a list `messages` .* but it has \[\]"),
        ({"turns": ["x"]}, r"a row must hold a list `messages` .* but it has \['turns'\]"),
        ({"prompt": 3}, "each message needs a `content` that is text alone, but that of message 1 is `int`"),
        ({"prompt": " \n"}, "the user's turn must be a text that is not empty"),
        ({"prompt": None}, "a row must hold a list `messages`"),
        ({"prompt": "nice \ud83d"}, "a text must be of whole characters"),
        ({"messages": "x"}, "a row must hold a list `messages`"),
        ({"messages": []}, "a row must hold a list `messages`"),
        ({"messages": [1]}, "each message needs a `role`"),
        ({"messages": [{"content": "x"}]}, "each message needs a `role`"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the assistant must have something to answer"),
        ({"messages": [{"role": "user", "content": [1]}]}, "text alone, but that of message 1 is `list`"),
        ({"messages": [{"role": "system"}, USER]}, "text alone, but that of message 1 is `NoneType`"),
    ],
)
def test_a_row_that_is_no_prompt_is_refused_with_file_line_and_what_came(
    tmp_path: Path, row: Any, message: str
) -> None:
    path = write(tmp_path / "sums.jsonl", {"prompt": "one"}, row)

    with pytest.raises(ConversationError, match=rf"sums\.jsonl, line 2: (?:.* )?{message}"):
        read_prompts([path])


def test_two_prompts_with_one_id_are_refused_with_both_lines(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "one"}
    path = write(tmp_path / "sums.jsonl", row, {"id": "b", "prompt": "two"}, row)
    other = tmp_path / "more" / "sums.jsonl"
    other.parent.mkdir()

    with pytest.raises(
        ConversationError, match=r"sums\.jsonl, line 3: .* but 'a' is also that of .*sums\.jsonl, line 1"
    ):
        read_prompts([path])
    with pytest.raises(ConversationError, match=r"files of one name are one set"):
        read_prompts([write(tmp_path / "sums.jsonl", row), write(other, row)])


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversationError, match=r"The data file `nowhere\.jsonl` does not exist"):
        read_prompts(["nowhere.jsonl"])
    with pytest.raises(ConversationError, match=r"sums\.jsonl` must hold a prompt in each line, but it is empty"):
        read_prompts([write(tmp_path / "sums.jsonl", "", " ")])
    (tmp_path / "sums.jsonl").write_bytes('{"prompt": "größer"}'.encode("latin-1"))
    with pytest.raises(ConversationError, match=r"line 1: it must be JSON, but Invalid"):
        read_prompts([str(tmp_path / "sums.jsonl")])


def test_a_prompt_too_long_for_the_targets_context_is_refused_with_file_and_line(tmp_path: Path) -> None:
    prompts = read_prompts([write(tmp_path / "sums.jsonl", {"prompt": "one"}, {"prompt": "one " * 30})])
    tokenizer = make_tokenizer()
    length = prompts[1].input_ids(tokenizer).shape[1]
    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(max_position_embeddings=length + 8))

    check_lengths(prompts, tokenizer, config, max_new_tokens=8)

    with pytest.raises(ConversationError, match=rf"line 2: a prompt and its 9 new tokens .* the prompt has {length}"):
        check_lengths(prompts, tokenizer, config, max_new_tokens=9)


def test_a_target_that_names_no_context_takes_any_prompt(tmp_path: Path) -> None:
    prompts = read_prompts([write(tmp_path / "sums.jsonl", {"prompt": "one " * 30})])

    check_lengths(prompts, make_tokenizer(), SimpleNamespace(get_text_config=lambda decoder: object()), 10**9)
