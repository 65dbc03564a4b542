"""Metrics, loaded and called as a user does."""

import contextlib
import io
import json
import os
import re
import socket
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.runs import plain
from tests.test_readme import blocks
from transformers_falcon_spec import FalconSpecDrafter, GenerationStats
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.metrics import FOLDER, METRICS, metric_path
from transformers_falcon_spec.evaluation.metrics.gsm8k_exact_match.gsm8k_exact_match import final_number
from transformers_falcon_spec.evaluation.summary import summarize, wilson_interval

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
WHOLE_SETS = Path(os.environ.get("FALCON_SPEC_DATA", DATA / "whole"))
Load = Callable[[str], Any]


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


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_loads_without_a_network(load_metric: Load, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)

    assert load_metric(name).name.replace("_", "") == name.replace("_", "")  # made from the name of its class


def test_every_folder_is_a_metric_with_its_module_in_it() -> None:
    found = sorted(path.parent.name for path in FOLDER.glob("*/*.py") if path.stem == path.parent.name)

    assert found == sorted(METRICS)


def test_an_unknown_metric_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"must be one of `acceptance`, .*`token_parity`, but it is `bleu`\."):
        metric_path("bleu")


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_of_nothing_is_refused(load_metric: Load, name: str) -> None:
    metric = load_metric(name)

    with pytest.raises(OptionError, match=r"at least one row, but there is none"):
        metric.compute(**{column: [] for column in metric.features})


def test_acceptance_is_pooled_over_texts(load_metric: Load) -> None:
    first, second = GenerationStats(), GenerationStats()
    for num_accepted in (0, 2, 3):
        first.record(num_nodes=5, max_depth=3, num_accepted=num_accepted)
    second.record(num_nodes=9, max_depth=3, num_accepted=1)
    columns = {
        name: [getattr(stats, name) for stats in (first, second)]
        for name in ("num_steps", "num_accepted", "num_drafted")
    }

    found = load_metric("acceptance").compute(**columns)

    assert found["acceptance_length"] == (first + second).acceptance_length == 1 + 6 / 4
    assert found["acceptance_rate"] == (first + second).acceptance_rate == 6 / 20
    assert found["acceptance_length_interval"] == (2.0, 1 + 5 / 3)  # only the second, only the first text


@pytest.mark.parametrize("counts", [(-1, 0, 0), (1, 3, 2), (0, 0, 2), (1, None, 2)])
def test_counts_that_cannot_be_are_refused(load_metric: Load, counts: tuple[int | None, ...]) -> None:
    names = ("num_steps", "num_accepted", "num_drafted")

    with pytest.raises(
        OptionError, match=rf"row 1 has {counts[0]} steps, {counts[1]} accepted and {counts[2]} drafted"
    ):
        load_metric("acceptance").compute(**{name: [4, count] for name, count in zip(names, counts, strict=True)})


def test_the_speed_up_is_that_of_the_benchmark(load_metric: Load) -> None:
    seconds = {"target": [2.0, 3.0, 5.0], "drafter": [1.0, 2.5, 2.0]}
    stats = GenerationStats(num_steps=10, draft_seconds=0.1, verify_seconds=0.4, prefill_seconds=0.1)
    records = [
        {
            "target": "t",
            "arm": arm,
            "block_size": 2,
            "prefill_seconds": 0.1,
            "decoding": "greedy",
            "set": "sums",
            "prompt": str(i),
            "repeat": 0,
            "seconds": time,
        }
        | {"num_tokens": 20 + i, "token_ids": [i], "repetition_rate": 0.0, "speculation": vars(stats)}
        for arm, times in seconds.items()
        for i, time in enumerate(times)
    ]
    (row,) = summarize(records, seed=7)

    found = load_metric("speedup").compute(
        num_tokens=[20, 21, 22],
        seconds=seconds["drafter"],
        baseline_num_tokens=[20, 21, 22],
        baseline_seconds=seconds["target"],
        seed=7,
    )

    assert found["speedup"] == pytest.approx(10 / 5.5)
    assert found == {name: row[name] for name in found}


@pytest.mark.parametrize("run", [(0, 1.0), (5, 0.0), (5, -1.0), (5, float("nan")), (5, float("inf")), (5, None)])
def test_runs_without_tokens_or_time_are_refused(load_metric: Load, run: tuple[int, float | None]) -> None:
    with pytest.raises(OptionError, match=r"A run must have tokens and seconds, both positive, but row 1 has"):
        load_metric("speedup").compute(
            num_tokens=[5, 5], seconds=[1.0, 1.0], baseline_num_tokens=[5, run[0]], baseline_seconds=[1.0, run[1]]
        )


def test_parity_counts_equal_texts_and_shows_where_others_differ(load_metric: Load) -> None:
    found = load_metric("token_parity").compute(
        predictions=[[1, 2, 3], [1, 2], [9, 2, 3], [], [1, 2, 3, 4]],
        references=[[1, 2, 3], [1, 2, 3], [1, 2, 3], [], [1, 2, 3]],
    )

    assert found == {
        "identical_share": 2 / 5,
        "identical_share_interval": wilson_interval(2, 5),
        "num_identical": 2,
        "num_texts": 5,
        "first_differences": [None, 2, 0, None, 3],
    }


@pytest.mark.parametrize("text", [None, [1, None]])
def test_a_missing_text_is_not_an_equal_one(load_metric: Load, text: Any) -> None:
    with pytest.raises(OptionError, match=r"some text or token is missing"):
        load_metric("token_parity").compute(predictions=[text], references=[text])


def test_reference_solutions_score_one_and_near_misses_zero(load_metric: Load) -> None:
    check_reference_solutions(load_metric, SOLUTIONS)


@pytest.mark.slow
def test_all_reference_solutions_of_gsm8k_score_one_and_near_misses_zero(load_metric: Load) -> None:
    check_reference_solutions(load_metric, [row["answer"] for row in whole_set("gsm8k_test.jsonl")])


def check_reference_solutions(load_metric: Load, solutions: list[str]) -> None:
    metric = load_metric("gsm8k_exact_match")
    numbers = [int(solution.split("#### ")[1].replace(",", "")) for solution in solutions]
    misses = [text for number in numbers for text in near_misses(number)]
    references = [solution for solution in solutions for _ in near_misses(1)]

    right = metric.compute(predictions=solutions, references=solutions)
    bare = metric.compute(predictions=solutions, references=[str(number) for number in numbers])
    unmarked = metric.compute(predictions=[text.replace("####", "It is") for text in solutions], references=solutions)
    wrong = metric.compute(predictions=misses, references=references)

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


def test_a_reference_without_a_number_is_refused(load_metric: Load) -> None:
    with pytest.raises(OptionError, match=r"A reference must hold a number, but row 1 has none: 'many'"):
        load_metric("gsm8k_exact_match").compute(predictions=["1", "2"], references=["1", "many"])


def test_reference_programs_pass_and_broken_ones_fail(load_metric: Load) -> None:
    check_reference_programs(load_metric, PROBLEMS)


@pytest.mark.slow
def test_all_reference_programs_of_humaneval_pass_and_broken_ones_fail(load_metric: Load) -> None:
    check_reference_programs(load_metric, whole_set("humaneval.jsonl"))


def check_reference_programs(load_metric: Load, problems: list[dict[str, str]]) -> None:
    metric = load_metric("humaneval_pass_at_1")
    right = [problem["canonical_solution"] for problem in problems]
    again = [problem["prompt"] + problem["canonical_solution"] for problem in problems]  # the whole function once more
    broken = ["    return None\n" for _ in problems]
    early = ["    import os\n    os._exit(0)\n" for _ in problems]

    found = [
        metric.compute(predictions=programs, references=problems, allow_code_execution=True)
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
def test_a_program_that_does_not_pass_its_tests_scores_zero(load_metric: Load, completion: str, reason: str) -> None:
    found = load_metric("humaneval_pass_at_1").compute(
        predictions=[completion], references=PROBLEMS[:1], allow_code_execution=True, timeout_seconds=1
    )

    assert found["num_passed"] == 0
    assert found["outcomes"][0]["reason"].startswith(reason)


@pytest.mark.parametrize("consent", [{}, {"allow_code_execution": False}, {"allow_code_execution": "no"}])
def test_no_program_runs_without_consent(
    load_metric: Load, monkeypatch: pytest.MonkeyPatch, consent: dict[str, Any]
) -> None:
    monkeypatch.setattr("subprocess.Popen", None)

    with pytest.raises(OptionError, match=r"pass `allow_code_execution=True`"):
        load_metric("humaneval_pass_at_1").compute(predictions=[""], references=PROBLEMS[:1], **consent)


def test_both_arms_have_the_same_scores_because_their_texts_are_the_same(load_metric: Load) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    target = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "reference-target").eval()
    drafter = FalconSpecDrafter.from_pretrained(ROOT / "models" / "falcon-reference").eval()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "reference-target")
    arms: dict[str, list[list[int]]] = {"alone": [], "drafted": []}
    for row in QUESTIONS[:2]:
        message = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        for arm, options in (("alone", {}), ("drafted", {"assistant_model": drafter})):
            out = plain(target, prompt, max_new_tokens=64, **options)
            arms[arm].append(out.sequences[0, prompt.shape[1] :].tolist())
    texts = {arm: tokenizer.batch_decode(ids, skip_special_tokens=True) for arm, ids in arms.items()}

    parity = load_metric("token_parity").compute(predictions=arms["drafted"], references=arms["alone"])
    by_solution, by_own_text = (
        [load_metric("gsm8k_exact_match").compute(predictions=texts[arm], references=references) for arm in arms]
        for references in (SOLUTIONS[:2], texts["alone"])
    )

    assert parity["num_identical"] == 2
    assert by_solution[0] == by_solution[1]
    assert by_own_text[0]["scores"] == by_own_text[1]["scores"] == [1, 1]


def test_the_page_prints_what_it_says(load_metric: Load) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    shown = io.StringIO()

    with contextlib.redirect_stdout(shown):
        for block in blocks(page, "python"):
            exec(block, names)  # noqa: S102  code of this repository

    assert re.sub(r"\s+", " ", shown.getvalue()) == re.sub(r"\s+", " ", "\n".join(blocks(page, "text")))


@pytest.mark.parametrize("name", METRICS)
def test_the_page_has_a_section_for_every_metric(name: str) -> None:
    assert f"## `{name}`\n" in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
