"""In each of ten families of chat templates exactly what the target writes counts in the loss, and behind the text that it reads."""

from collections import Counter
from itertools import groupby
from typing import Any

import pytest

from tests.chat_families import FAMILIES, Row, family_rows, family_tokenizer
from transformers_falcon_spec.errors import TrainingError
from transformers_falcon_spec.training.dataset import ConversationDataset

LONG = 4096
SYSTEM = {"role": "system", "content": "Be brief."}
PLAIN: Row = [
    {"role": "user", "content": "What is 3 plus 4?"},
    {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "And times 2?"},
    {"role": "assistant", "content": "It is 14."},
]
THOUGHTS = {1: "3 and 4 more.", 3: "7 and 7 more."}
BESIDE = [{**turn, "reasoning_content": THOUGHTS[n]} if n in THOUGHTS else turn for n, turn in enumerate(PLAIN)]
INSIDE = [
    {**turn, "content": f"<think>\n{THOUGHTS[n]}\n</think>\n\n{turn['content']}"} if n in THOUGHTS else turn
    for n, turn in enumerate(PLAIN)
]
EMPTY_THOUGHTS = ("<think>\n\n</think>\n\n", "<think></think>\n")  # put in by templates: read, but not learned


def runs(example: dict[str, Any], tokenizer: Any) -> list[tuple[bool, str]]:
    """The text in runs, and whether each counts in the loss."""
    pairs = zip(example["assistant_mask"], example["input_ids"], strict=True)
    return [
        (bool(counts), tokenizer.decode([token for _, token in run]))
        for counts, run in groupby(pairs, key=lambda pair: pair[0])
    ]


def answers(name: str, row: Row) -> list[str]:
    """Naively: what a target of the family writes for each answer of a row, with its thought and the end of the turn."""
    family, found = FAMILIES[name], []
    for turn in row:
        if turn["role"] == "assistant":
            thought, parted, said = turn["content"].rpartition("</think>")
            thought = turn.get("reasoning_content") or thought.removeprefix("<think>").strip()
            said = said.strip()
            if family.thought is None:
                said = turn["content"] if parted else said
            elif thought:
                said = family.thought[0] + thought + family.thought[1] + said
            if name == "gpt-oss":
                said = said.removesuffix(turn["content"]) + "<|channel|>final<|message|>" + turn["content"]
            found.append((" " if name == "mistral" else "") + said + family.end)
    return found


def check(name: str, row: Row, treatment: str, **kwargs: Any) -> ConversationDataset:
    """One row gives what the naive twin says, each answer behind the very tokens that the target reads before it."""
    tokenizer = family_tokenizer(name)
    data = ConversationDataset([row], tokenizer, LONG, template_kwargs=kwargs)
    assert data.treatments == {treatment: 1}
    assert [text for example in data for counts, text in runs(example, tokenizer) if counts] == answers(name, row)
    ends = [number for number, turn in enumerate(row) if turn["role"] == "assistant"]
    for number, end in enumerate(ends):
        example = data[0] if treatment == "whole" else data[number]
        prompt = tokenizer.apply_chat_template(row[:end], add_generation_prompt=True, return_dict=True, **kwargs)
        ids = prompt["input_ids"]
        assert example["input_ids"][: len(ids)] == ids
        rest = tokenizer.decode(example["input_ids"][len(ids) :])
        inserted = next((empty for empty in EMPTY_THOUGHTS if rest.startswith(empty)), "")
        start = len(ids) + len(tokenizer(inserted)["input_ids"])
        assert example["assistant_mask"][start - 1 : start + 1] == [0, 1]
    return data


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("deepseek-r1",)])
@pytest.mark.parametrize("has_system", [False, True])
def test_answers_without_thoughts_count_and_nothing_else(name: str, has_system: bool) -> None:
    family = FAMILIES[name]
    if has_system and not family.takes_system:
        with pytest.raises(TrainingError, match=r"1 rows: 1 left out \(100%: 1 refused by the chat template\)"):
            ConversationDataset([[SYSTEM, *PLAIN]], family_tokenizer(name), LONG)
        return

    check(name, [SYSTEM, *PLAIN] if has_system else PLAIN, family.treatment)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(name, row, id=f"{name}, {what}")
        for name, family in FAMILIES.items()
        for what, row in {"beside": BESIDE, "inside": INSIDE, "one turn": BESIDE[:2]}.items()
        if family.thought is not None and (name, what) != ("gpt-oss", "inside")  # which has them beside alone
    ],
)
def test_thoughts_count_in_the_turn_that_they_belong_to(name: str, row: Row) -> None:
    family = FAMILIES[name]
    is_one = len(row) == 2 and family.thinking_treatment == "turn by turn"

    check(name, row, "whole" if is_one else family.thinking_treatment)


@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "llama3", "gemma", "mistral", "phi"])
def test_thoughts_in_the_text_of_a_family_without_a_place_for_them_count_as_text(name: str) -> None:
    check(name, INSIDE, FAMILIES[name].treatment)


@pytest.mark.parametrize("name", ["qwen3", "glm"])
def test_with_thinking_off_the_empty_thought_is_part_of_the_prompt(name: str) -> None:
    tokenizer, opening = family_tokenizer(name), FAMILIES[name].opening

    data = ConversationDataset([PLAIN], tokenizer, LONG, template_kwargs={"enable_thinking": False})

    texts = [runs(example, tokenizer) for example in data]
    counted = [text for each in texts for counts, text in each if counts]
    assert counted == [f"It is {number}.{FAMILIES[name].end}" for number in (7, 14)]
    assert all(opening + "<think>" in each[0][1][-40:] for each in texts)


def test_an_answer_without_the_thought_that_the_prompt_begins_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    data = ConversationDataset([PLAIN, BESIDE], family_tokenizer("deepseek-r1"), LONG)

    assert data.treatments == {"an answer without a thought": 1, "as written": 1}
    assert "the prompt begins a thought, but the answer has none" in caplog.text


@pytest.mark.parametrize("name", ["qwen3", "glm"])
@pytest.mark.parametrize("row", [BESIDE, INSIDE], ids=["beside", "inside"])
def test_with_thinking_off_a_row_with_thoughts_is_left_out(name: str, row: Row) -> None:
    kwargs = {"enable_thinking": False}

    data = ConversationDataset([PLAIN, row], family_tokenizer(name), LONG, template_kwargs=kwargs)

    assert data.treatments["a thought where none is asked for"] == 1
    assert list(data) == list(ConversationDataset([PLAIN], family_tokenizer(name), LONG, template_kwargs=kwargs))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_the_last_answer_is_left_out(name: str) -> None:
    row = BESIDE if name == "deepseek-r1" else PLAIN
    one, other = (ConversationDataset([each], family_tokenizer(name), LONG) for each in (row, [*row, PLAIN[0]]))

    assert list(one) == list(other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma", "mistral", "phi", "deepseek-r1"])
def test_of_500_rows_each_has_its_treatment(name: str) -> None:
    family, expected = FAMILIES[name], Counter[str]()
    rows = family_rows(500, family)
    for row in rows:
        num_answers = sum(turn["role"] == "assistant" for turn in row)
        thinks = "reasoning_content" in row[-1] or "</think>" in row[-1]["content"]
        if row[0]["role"] == "system" and not family.takes_system:
            expected["refused by the chat template"] += 1
        elif name == "deepseek-r1":
            expected["as written" if thinks else "an answer without a thought"] += 1
        else:
            treatment = family.thinking_treatment if thinks else family.treatment
            expected["whole" if num_answers == 1 else treatment] += 1

    data = ConversationDataset(rows, family_tokenizer(name), LONG)

    assert data.treatments == expected
    used = [row for row in rows if name != "gemma" or row[0]["role"] != "system"]
    if name == "deepseek-r1":
        used = [row for row in used if "reasoning_content" in row[-1] or "</think>" in row[-1]["content"]]
    counted = [text for example in data for counts, text in runs(example, family_tokenizer(name)) if counts]
    assert counted == [text for row in used for text in answers(name, row)]
