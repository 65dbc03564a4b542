"""Evaluation prompts in training data are found in any typography, and nothing else is."""

import random

import pytest

from transformers_falcon_spec.errors import ConversationError
from transformers_falcon_spec.training.conversations import ConversationSet
from transformers_falcon_spec.training.overlap import OverlapIndex, without_overlaps, words_of

DUCKS = (
    "Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes four into muffins."
)
EIGHT = "How many eggs do sixteen white ducks lay"
SHORT = "What is 2 plus 3?"
PROMPTS = [(DUCKS, "gsm8k.jsonl, line 1"), (EIGHT, "line 2"), (SHORT, "line 3")]


def asked(*questions: str) -> ConversationSet:
    """A conversation of one question each."""
    rows = [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in questions]
    return ConversationSet(rows, [f"row {number}" for number in range(len(rows))])


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        (DUCKS, "gsm8k.jsonl, line 1"),
        (f"Answer briefly.\n\n{DUCKS.upper()}\nThink first.", "gsm8k.jsonl, line 1"),
        ("... JANET'S  ducks,\tlay 16 eggs per day -- she eats “three” for breakfast", "gsm8k.jsonl, line 1"),
        ("three for breakfast every morning and bakes four into muffins", None),  # 10 of its words
        ("eats three for breakfast every morning and bakes four into muffins, and more", None),  # 11
        ("a day. She eats three for breakfast every morning and bakes four into!", None),  # 12
        ("per day. She eats three for breakfast every morning and bakes four into!", "gsm8k.jsonl, line 1"),  # 13
        (f"Say it: {EIGHT}?", "line 2"),
        ("many eggs do sixteen white ducks lay, then?", None),
        ("what is 2 PLUS 3", "line 3"),
        ("What is 2 plus 3? And what is 4 plus 5?", None),
        ("", None),
    ],
)
def test_a_prompt_is_found_whatever_its_case_and_punctuation(text: str, origin: str | None) -> None:
    hit = OverlapIndex(PROMPTS).find(text)

    assert (hit and hit[0]) == origin


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("\uff57\uff49\uff44\uff45 Straße", "wide STRASSE"),
        ("def has_close(numbers):", "DEF has_close  numbers"),
        ("鸭子每天下十六个蛋。", "鸭子每天 下十六个蛋"),
        ("हिन्दी में, लिखो", "हिन्दी में लिखो"),
        ("a\u00a0b\u200bc", "a b c"),
    ],
)
def test_texts_that_look_the_same_have_the_same_words(text: str, other: str) -> None:
    assert words_of(text) == words_of(other)


def test_words_are_complete_in_every_script() -> None:
    assert words_of("हिन्दी में has_close") == ("हिन्दी", "में", "has_close")
    assert words_of("ตอบ") == ("ต", "อ", "บ")
    assert words_of("!? ...") == ("!?", "...")


def holds(text: str, prompt: str) -> bool:
    """Whether a run of 13 words occurs, or all words of a shorter prompt; one of under 8 must be the whole text."""
    words, prompt_words = words_of(text), words_of(prompt)
    if len(prompt_words) < 8:
        return words == prompt_words
    length = min(13, len(prompt_words))
    runs = [" ".join(prompt_words[start : start + length]) for start in range(len(prompt_words) - length + 1)]
    return any(f" {run} " in f" {' '.join(words)} " for run in runs)


def test_the_index_agrees_with_searching_for_each_run() -> None:
    generator = random.Random(0)

    def words(least: int, most: int) -> list[str]:
        return generator.choices("ab", [5, 1], k=generator.randint(least, most))  # few words, so that runs are shared

    prompts = [" ".join(words(1, 18)) for _ in range(4)]
    texts = [" ".join(words(1, 24)) for _ in range(300)] + prompts
    index = OverlapIndex((prompt, prompt) for prompt in prompts)

    found = [index.find(text) is not None for text in texts]

    assert found == [any(holds(text, prompt) for prompt in prompts) for text in texts]
    assert 50 < sum(found) < 250


def test_any_turn_counts_and_each_row_is_left_out_once(caplog: pytest.LogCaptureFixture) -> None:
    data = asked("one", DUCKS, "two", "three")
    data.rows[2][1]["content"] = f"{SHORT} {DUCKS}"
    data.rows.append([*asked(DUCKS).rows[0], *asked(EIGHT).rows[0]])
    data.origins.append("row 4")

    kept = without_overlaps(data, OverlapIndex(PROMPTS))

    shared = "shares 'janet s ducks lay 16 eggs per day she eats three for breakfast' with gsm8k.jsonl, line 1."
    said = [f"row {number}: a row must not hold an evaluation prompt, but it {shared}" for number in (1, 2, 4)]
    assert (kept.rows, kept.origins) == ([*asked("one").rows, *asked("three").rows], ["row 0", "row 3"])
    assert [str(error) for error in kept.errors] == said
    assert kept.reasons == {"an evaluation prompt": 3}
    assert [f"Left out: {text}" in caplog.text for text in said] == [True] * 3
    assert "Left out: 3 of 5 conversations hold evaluation prompts." in caplog.text


def test_data_of_evaluation_prompts_alone_are_refused() -> None:
    with pytest.raises(ConversationError, match="but each of the 4 conversations holds one: row 3: a row must not"):
        without_overlaps(asked(*[DUCKS] * 4), OverlapIndex(PROMPTS))


def test_clean_data_passes(caplog: pytest.LogCaptureFixture) -> None:
    for data, prompts in ((asked("one", "three"), PROMPTS), (asked(DUCKS), [])):
        kept = without_overlaps(data, OverlapIndex(prompts))
        assert (kept.rows, kept.errors) == (data.rows, [])
    assert caplog.text == ""
