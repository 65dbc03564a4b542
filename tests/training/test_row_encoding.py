"""A row of many turns is divided into tokens from its special tokens on as it would be from its beginning."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.chat import MARKED_TEMPLATE, PLAIN_TEMPLATE, make_tokenizer
from tests.chat_families import FAMILIES, Row, family_tokenizer
from transformers_falcon_spec.errors import ConversationError
from transformers_falcon_spec.training import row_encoding
from transformers_falcon_spec.training.chat_template import ChatTemplate
from transformers_falcon_spec.training.row_encoding import Example, Turn, encode_row

ANSWERS = {
    "plain": ["It is 7.", "It is 14.", "No.", "It is 7.", "Yes, 8."],
    "with spaces": ["  Arr!  \n", "a\nb\n", "\tc", "d ", " e"],
    "trimmed ends alone": ["a\n", "b\n", "c\n", "d\n", "e\n"],
    "of other letters": ["机器学习", "naïve “quote”", "👩‍👩‍👧‍👦 ok", "é\u0301", "مرحبا"],
    "like questions": ["What is 0?", "What is 1?", "What is 2?", "user", "assistant"],
    "with special tokens": ["<|im_end|>", "a</s>b", "<|user|>", "[INST] x", "<s>"],
    "with a thought": ["a", "b", "<think>\nhm\n</think>\n\nc", "d", "e"],
    "with one empty": ["a", "b", "", "d", "e"],
}


def talk(answers: Sequence[str], has_system: bool = False) -> Row:
    row: Row = [{"role": "system", "content": "Be brief."}] if has_system else []
    for number, answer in enumerate(answers):
        row += [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": answer}]
    return row


def naive_whole(turns: Sequence[Turn], template: ChatTemplate) -> Example | None:
    """Naively: each prompt and each answer is divided into tokens from the beginning of the row."""
    ids = template.ids(turns[-1].text)
    mask = [0] * len(ids)
    for turn in turns:
        before, after = template.ids(turn.prompt), template.ids(turn.text)
        end = row_encoding._end_of_answer(after, len(before), template)
        if ids[:end] != after[:end] or after[: len(before)] != before:
            return None
        mask[len(before) : end] = [1] * (end - len(before))
    return {"input_ids": ids, "assistant_mask": mask}


def encoded(row: Row, template: ChatTemplate) -> Any:
    try:
        return encode_row(row, template)
    except ConversationError as error:
        return str(error)


@pytest.mark.parametrize("name", [*FAMILIES, "plain", "marked"])
@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("has_system", [False, True], ids=["", "with a system turn"])
def test_many_turns_are_divided_as_each_from_the_beginning(
    name: str, kind: str, has_system: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"plain": PLAIN_TEMPLATE, "marked": MARKED_TEMPLATE}
    tokenizer = make_tokenizer(others[name]) if name in others else family_tokenizer(name)
    template, row = ChatTemplate(tokenizer), talk(ANSWERS[kind], has_system)

    found = encoded(row, template)
    monkeypatch.setattr(row_encoding, "_whole", naive_whole)

    assert found == encoded(row, template)
