"""Evaluation prompts in training data are found in any typography, and nothing else is."""

import json
import random
from pathlib import Path

import overlap
import pytest
from overlap import OverlapIndex, words_of

DUCKS = (
    "Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes four into muffins."
)
EIGHT = "How many eggs do sixteen white ducks lay"
SHORT = "What is 2 plus 3?"
PROMPTS = [(DUCKS, "gsm8k.jsonl, line 1"), (EIGHT, "line 2"), (SHORT, "line 3")]


def asked(question: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "yes"}]


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


def test_any_turn_counts_and_each_row_is_left_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [asked(text) for text in ("one", DUCKS, "two", "three")]
    rows[2][1]["content"] = f"{SHORT} {DUCKS}"
    rows.append([*asked(DUCKS), *asked(EIGHT)])
    data, prompts = tmp_path / "data.jsonl", tmp_path / "gsm8k.jsonl"
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    shared = {"role": "system", "content": "one"}
    asks = [[shared, {"role": "user", "content": text}] for text, _ in PROMPTS]
    prompts.write_text("".join(json.dumps({"messages": row}) + "\n" for row in asks), encoding="utf-8")
    options = ["--data", str(data), "--forbid", str(prompts), "--output", str(tmp_path / "clean.jsonl")]

    monkeypatch.setattr("sys.argv", ["overlap.py", *options])
    overlap.main()

    said = capsys.readouterr().out
    words = "'janet s ducks lay 16 eggs per day she eats three for breakfast'"
    kept = [
        json.loads(line)["messages"] for line in (tmp_path / "clean.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert kept == [rows[0], rows[3]]
    for number in (2, 3, 5):
        assert f"Left out: {data}, line {number}: it shares {words} with {prompts}, line 1." in said
    assert said.count("Left out") == 3
    assert "2 of 5 conversations are in" in said
