"""Conversations as token ids, with a mask of the assistant's tokens."""

from typing import Any

import pytest
import torch

from tests.chat import MARKED_TEMPLATE, PLAIN_TEMPLATE, make_rows, make_tokenizer
from transformers_falcon_spec.errors import TrainingError
from transformers_falcon_spec.training import dataset
from transformers_falcon_spec.training.dataset import ConversationCollator, ConversationDataset
from transformers_falcon_spec.training.row_encoding import encode_row

LONG = 200
DIALOGUE = [
    {"role": "system", "content": "two"},
    {"role": "user", "content": "one plus one is"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "times three"},
    {"role": "assistant", "content": "six minus two"},
]
REWRITING_TEMPLATE = (  # shows only the last answer, as templates of reasoning models do
    "{% for message in messages %}{% if message['role'] != 'assistant' or loop.last %}"
    "<{{ message['role'] }}>{{ message['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTING_TEMPLATE = PLAIN_TEMPLATE.replace("<assistant>{% endif %}", "<assistant>two {% endif %}")  # words of its own
HIDING_TEMPLATE = (  # takes thoughts out of every answer, and ends none
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'].split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
REFUSING_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + PLAIN_TEMPLATE
)


def assistant_texts(example: dict[str, list[int]], tokenizer: Any) -> list[str]:
    """The runs of tokens under the mask, as text."""
    runs, ids = [], []
    for token, is_spoken in zip([*example["input_ids"], 0], [*example["assistant_mask"], 0], strict=True):
        if is_spoken:
            ids.append(token)
        elif ids:
            runs.append(tokenizer.decode(ids))
            ids = []
    return runs


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE], ids=["found by turns", "marked"])
def test_the_mask_covers_the_assistants_tokens_with_the_end_of_the_turn_and_no_more(template: str) -> None:
    tokenizer = make_tokenizer(template)

    (example,) = ConversationDataset([DIALOGUE], tokenizer, LONG)

    assert assistant_texts(example, tokenizer) == ["two</s>", "six minus two</s>"]
    assert tokenizer.decode(example["input_ids"]).startswith("<system>two</s><user>one plus one is</s><assistant>two")


def test_marks_and_turns_give_the_same_mask() -> None:
    rows = [*make_rows(5), DIALOGUE]

    marked = ConversationDataset(rows, make_tokenizer(MARKED_TEMPLATE), LONG)
    by_turns = ConversationDataset(rows, make_tokenizer(PLAIN_TEMPLATE), LONG)

    assert list(marked) == list(by_turns)


def test_marks_with_white_space_control_are_seen() -> None:
    template = MARKED_TEMPLATE.replace("{% generation %}", "{%- generation -%}")

    (example,) = ConversationDataset([DIALOGUE], make_tokenizer(template), LONG)

    assert len(assistant_texts(example, make_tokenizer())) == 2


def test_a_row_whose_template_rewrites_earlier_turns_gives_an_example_of_each_answer() -> None:
    tokenizer = make_tokenizer(REWRITING_TEMPLATE)

    data = ConversationDataset([DIALOGUE[1:3], DIALOGUE], tokenizer, LONG)

    assert data.treatments == {"whole": 1, "turn by turn": 1}
    assert [assistant_texts(example, tokenizer) for example in data] == [
        ["two</s>"],
        ["two</s>"],
        ["six minus two</s>"],
    ]
    assert tokenizer.decode(data[2]["input_ids"]).endswith("<user>times three</s><assistant>six minus two</s>")
    assert data.origins == ["row 0", "row 1, answer 1", "row 1, answer 2"]


def test_an_answer_that_is_never_shown_behind_its_prompt_is_put_there() -> None:
    tokenizer = make_tokenizer(PROMPTING_TEMPLATE)

    data = ConversationDataset([DIALOGUE], tokenizer, LONG)

    assert data.treatments == {"as written": 1}
    assert [assistant_texts(example, tokenizer) for example in data] == [["two</s>"], ["six minus two</s>"]]
    assert tokenizer.decode(data[0]["input_ids"]).endswith("plus one is</s><assistant>two two</s>")


def test_an_answer_that_nothing_ends_but_the_next_turn_counts_with_the_token_of_that_turn() -> None:
    tokenizer = make_tokenizer(HIDING_TEMPLATE)
    row = [{"role": "user", "content": "one plus"}, {"role": "assistant", "content": "<think>one</think>two"}]

    data = ConversationDataset([row], tokenizer, LONG)

    assert data.treatments == {"as written": 1}
    assert assistant_texts(data[0], tokenizer)[0].endswith("two<user>")


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"needs a chat template.*Set `tokenizer\.chat_template`"):
        ConversationDataset([DIALOGUE], make_tokenizer(None), LONG)


def test_a_row_that_the_template_refuses_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    data = ConversationDataset([DIALOGUE, DIALOGUE[1:]], make_tokenizer(REFUSING_TEMPLATE), LONG)

    assert len(data) == 1
    assert "no system turn" in caplog.text


def test_examples_are_cut_and_those_without_an_answer_left_out() -> None:
    tokenizer = make_tokenizer()
    question, answer = [{"role": "user", "content": "one " * 30}], [{"role": "assistant", "content": "two"}]

    data = ConversationDataset([DIALOGUE, question + answer], tokenizer, max_length=20)

    (example,) = list(data)
    assert len(example["input_ids"]) == len(example["assistant_mask"]) == 20
    assert example["input_ids"] == ConversationDataset([DIALOGUE], tokenizer, LONG)[0]["input_ids"][:20]


def test_no_answer_within_the_length_is_refused() -> None:
    with pytest.raises(TrainingError, match="Not one of 3 conversations has an assistant token in 2 tokens"):
        ConversationDataset(make_rows(3), make_tokenizer(), max_length=2)


@pytest.mark.parametrize("pad_token_id", [0, 7, None])
def test_a_batch_is_padded_on_the_right_with_nothing_spoken(pad_token_id: int | None) -> None:
    examples = [
        {"input_ids": [5, 6, 8], "assistant_mask": [0, 1, 1]},
        {"input_ids": [9], "assistant_mask": [1]},
    ]

    batch = ConversationCollator(pad_token_id)(examples)

    pad = pad_token_id or 0
    assert batch["input_ids"].tolist() == [[5, 6, 8], [9, pad, pad]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["assistant_mask"].tolist() == [[False, True, True], [True, False, False]]
    assert batch["input_ids"].dtype == torch.long


def test_what_was_encoded_is_read_from_the_cache_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(3, seed=77)
    first = ConversationDataset(rows, make_tokenizer(), LONG)
    encoded = []

    def note(row: Any, template: Any) -> Any:
        encoded.append(row)
        return encode_row(row, template)

    monkeypatch.setattr(dataset, "encode_row", note)

    again = ConversationDataset(rows, make_tokenizer(), 20)
    assert not encoded
    assert list(again) == [{name: ids[:20] for name, ids in each.items()} for each in list(first)]

    ConversationDataset(rows[:2], make_tokenizer(), LONG)
    assert encoded == rows[:2]
    ConversationDataset(rows, make_tokenizer(MARKED_TEMPLATE), LONG)
    assert encoded == rows[:2] + rows


def test_a_template_that_raises_errors_of_python_harms_no_other_row() -> None:
    template = PLAIN_TEMPLATE.replace(
        "{% for", "{% if messages[0]['role'] == 'system' %}{{ 1 + 'a' }}{% endif %}{% for", 1
    )

    data = ConversationDataset([DIALOGUE, DIALOGUE[1:]], make_tokenizer(template), LONG)

    assert data.treatments == {"refused by the chat template": 1, "whole": 1}


def test_a_template_that_is_no_jinja_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"refused by the chat template.*TemplateSyntaxError"):
        ConversationDataset([DIALOGUE], make_tokenizer(PLAIN_TEMPLATE + "{% if %}"), LONG)


def test_templates_of_which_none_is_the_default_are_refused_by_name() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"rag": PLAIN_TEMPLATE, "tool_use": PLAIN_TEMPLATE}

    with pytest.raises(TrainingError, match=r"must be called `default`, but they are \['rag', 'tool_use'\]"):
        ConversationDataset([DIALOGUE], tokenizer, LONG)
