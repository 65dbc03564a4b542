"""Scores of GSM8K answers and HumanEval programs: reference solutions score one, near misses and broken programs zero."""

import doctest
import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import sandbox
import scoring
from sandbox import Limits
from scoring import exact_match, final_number, pass_at_1

from tests.runs import plain
from transformers_falcon_spec import FalconSpecDrafter
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.summary import wilson_interval

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
WHOLE_SETS = Path(os.environ.get("FALCON_SPEC_DATA", DATA / "whole"))


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def whole_set(name: str) -> list[dict[str, str]]:
    """All rows of a public set, which is not part of the repository."""
    path = WHOLE_SETS / name
    if not path.exists():
        pytest.skip(f"`{path}` is absent: put the set there, or name its folder in FALCON_SPEC_DATA")
    return rows(path)


QUESTIONS = rows(DATA / "gsm8k.jsonl")
SOLUTIONS = [row["answer"] for row in QUESTIONS]
PROBLEMS = rows(DATA / "humaneval.jsonl")


def test_reference_solutions_score_one_and_near_misses_zero() -> None:
    check_reference_solutions(SOLUTIONS)


@pytest.mark.slow
def test_all_reference_solutions_of_gsm8k_score_one_and_near_misses_zero() -> None:
    check_reference_solutions([row["answer"] for row in whole_set("gsm8k_test.jsonl")])


def check_reference_solutions(solutions: list[str]) -> None:
    numbers = [int(solution.split("#### ")[1].replace(",", "")) for solution in solutions]
    misses = [text for number in numbers for text in near_misses(number)]
    references = [solution for solution in solutions for _ in near_misses(1)]

    right = exact_match(predictions=solutions, references=solutions)
    bare = exact_match(predictions=solutions, references=[str(number) for number in numbers])
    unmarked = exact_match(predictions=[text.replace("####", "It is") for text in solutions], references=solutions)
    wrong = exact_match(predictions=misses, references=references)

    assert right["scores"] == bare["scores"] == unmarked["scores"] == [1] * len(solutions)
    assert right["exact_match_interval"] == wilson_interval(len(solutions), len(solutions))
    assert [row for row, score in zip(misses, wrong["scores"], strict=True) if score] == []
    assert wrong["num_answers"] == 9 * len(solutions)


def near_misses(number: int) -> list[str]:
    """Answers that come close to `number` and are wrong."""
    return [
        f"#### {number + 1}",
        f"#### {number - 1}",
        f"#### {-number}",
        f"#### {number}0",
        f"#### {number}.5",
        f"The answer is {number}. #### {number + 2}",
        f"It is 1/{number + 1}",
        f"{number} is wrong, {number + 3} is right.",
        "I do not know.",
    ]


@pytest.mark.parametrize(
    "answer",
    [
        "#### 1000",
        "####1,000.",
        "#### $1000.00",
        "#### **1,000** dollars",
        "#### 1000\n#### 7",
        "#### 1000\nQuestion: what is 3 + 4? It is 7.",
        "####\nSo it is 1000",
        "So 500 + 500 = 1,000.",
        "16-3 is 13, and in all $1,000!",
        "That is 2000/2",
        "01000",
    ],
)
def test_the_same_number_in_other_words_is_the_same_answer(answer: str) -> None:
    assert final_number(answer) == 1000


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("-5", -5),
        ("\N{MINUS SIGN}$5", -5),
        ("$-5", -5),
        ("16-3", 3),
        ("(2)-3", 3),
        (".5", Fraction(1, 2)),
        ("3/4 of it", Fraction(3, 4)),
        ("1,80", 80),  # no number of three digits after the comma: a list
        ("5/0", None),
        ("9" * 5000, None),
        ("", None),
    ],
)
def test_numbers_are_read_as_written(answer: str, number: Fraction | None) -> None:
    assert final_number(answer) == number


def test_a_reference_without_a_number_is_refused() -> None:
    with pytest.raises(OptionError, match=r"A reference must hold a number, but row 1 has none: 'many'"):
        exact_match(predictions=["1", "2"], references=["1", "many"])


def test_reference_programs_pass_and_broken_ones_fail() -> None:
    check_reference_programs(PROBLEMS)


@pytest.mark.slow
def test_all_reference_programs_of_humaneval_pass_and_broken_ones_fail() -> None:
    check_reference_programs(whole_set("humaneval.jsonl"))


def check_reference_programs(problems: list[dict[str, str]]) -> None:
    right = [problem["canonical_solution"] for problem in problems]
    again = [problem["prompt"] + problem["canonical_solution"] for problem in problems]  # the whole function once more
    broken = ["    return None\n" for _ in problems]
    early = ["    import os\n    os._exit(0)\n" for _ in problems]

    found = [
        pass_at_1(predictions=programs, problems=problems, allow_code_execution=True)
        for programs in (right, again, broken, early)
    ]

    failed = [[outcome for outcome in each["outcomes"] if not outcome["passed"]] for each in found]
    assert [failed[0], failed[1]] == [[], []]
    assert [each["pass_at_1"] for each in found] == [1, 1, 0, 0]
    assert found[0]["pass_at_1_interval"] == wilson_interval(len(problems), len(problems))
    assert [outcome["task_id"] for outcome in found[0]["outcomes"]] == [problem["task_id"] for problem in problems]


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("    return number % 1.0 + 0.1\n", "AssertionError"),
        ("    return number %", "SyntaxError"),
        ("", "AssertionError"),
        ("    while True: pass\n", "Stopped after 1 seconds."),
        ("    return bytearray(2**31)\n", "MemoryError"),
        ("    import os\n    os._exit(0)\n", "The process ended before the program's last line."),
        ("    return 0.5\n\nimport os\nos._exit(0)\n", "The process ended before the program's last line."),
        ("    return 0.5\n\nraise SystemExit(0)\n", "SystemExit: 0"),
    ],
)
def test_a_program_that_does_not_pass_its_tests_scores_zero(completion: str, reason: str) -> None:
    found = pass_at_1(
        predictions=[completion], problems=PROBLEMS[:1], allow_code_execution=True, limits=Limits(timeout_seconds=1)
    )

    assert found["num_passed"] == 0
    assert found["outcomes"][0]["reason"].startswith(reason)


@pytest.mark.parametrize("consent", [{}, {"allow_code_execution": False}, {"allow_code_execution": "no"}])
def test_no_program_runs_without_consent(monkeypatch: pytest.MonkeyPatch, consent: dict[str, Any]) -> None:
    monkeypatch.setattr("subprocess.Popen", None)

    with pytest.raises(OptionError, match=r"pass `allow_code_execution=True`"):
        pass_at_1(predictions=[""], problems=PROBLEMS[:1], **consent)


def test_both_methods_have_the_same_scores_because_their_texts_are_the_same() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    target = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "reference-target").eval()
    drafter = FalconSpecDrafter.from_pretrained(ROOT / "models" / "falcon-reference").eval()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "reference-target")
    texts: dict[str, list[str]] = {"alone": [], "drafted": []}
    for row in QUESTIONS[:2]:
        message = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        for method, options in (("alone", {}), ("drafted", {"assistant_model": drafter})):
            out = plain(target, prompt, max_new_tokens=64, **options)
            texts[method].append(tokenizer.decode(out.sequences[0, prompt.shape[1] :], skip_special_tokens=True))

    by_solution, by_own_text = (
        [exact_match(texts[method], references) for method in texts] for references in (SOLUTIONS[:2], texts["alone"])
    )

    assert texts["drafted"] == texts["alone"]
    assert by_solution[0] == by_solution[1]
    assert by_own_text[0]["scores"] == by_own_text[1]["scores"] == [1, 1]


@pytest.mark.parametrize("module", [scoring, sandbox], ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_run(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
