"""Scores of texts that a model wrote: the share of GSM8K answers that end in the right number, and of HumanEval programs that pass."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from sandbox import Limits, run_program

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.summary import wilson_interval

NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-\N{MINUS SIGN}])?[$€£]?"  # after a word or a bracket it means less, not minus
    r"(?P<value>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:/(?P<divisor>[0-9]+))?"
)
MARK = "####"
MOST_DIGITS = 60  # a model that repeats itself writes thousands; no answer has that many


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Score answers to GSM8K (Cobbe et al., arXiv 2110.14168) by their last number; numbers are compared as numbers.

    Args:
        predictions (`Sequence[str]`): Answers.
        references (`Sequence[str]`): Reference solutions; a bare number will do.

    Raises:
        [`OptionError`]: there is no answer, or a reference without a number.

    Example:

    ```python
    >>> exact_match(["So she makes $18.00 a day.", "#### 17"], ["9 * 2 = $18 #### 18", "#### 18"])["scores"]
    [1, 0]

    ```
    """
    if not predictions:
        raise OptionError("A score must be computed over at least one text, but there is none.")
    expected = [final_number(reference) for reference in references]
    if None in expected:
        row = expected.index(None)
        raise OptionError(f"A reference must hold a number, but row {row} has none: {references[row]!r:.200}")
    found = [final_number(prediction) for prediction in predictions]
    scores = [int(ours == theirs) for ours, theirs in zip(found, expected, strict=True)]
    return {
        "exact_match": sum(scores) / len(scores),
        "exact_match_interval": wilson_interval(sum(scores), len(scores)),
        "num_correct": sum(scores),
        "num_answers": len(scores),
        "scores": scores,
    }


def final_number(answer: str) -> Fraction | None:
    """The number after the first `####` on its line; without one the last number of the answer; None without any.

    Example:

    ```python
    >>> final_number("16 - 3 - 4 = 9 eggs, so she makes 9 * 2 = $18. #### 18")
    Fraction(18, 1)
    >>> final_number("That makes 1,250.50 dollars.")
    Fraction(2501, 2)
    >>> final_number("I do not know.") is None
    True

    ```
    """
    marked = answer.partition(MARK)[2].split("\n", 1)[0]
    matches = [*NUMBER.finditer(marked)][:1] or [*NUMBER.finditer(answer)][-1:]
    return _value(matches[0]) if matches else None


def _value(match: re.Match[str]) -> Fraction | None:
    value, divisor = match["value"].replace(",", ""), match["divisor"] or "1"
    if len(value) + len(divisor) > MOST_DIGITS or not divisor.strip("0"):
        return None
    return Fraction(value) / int(divisor) * (-1 if match["sign"] else 1)


def pass_at_1(
    predictions: Sequence[str],
    problems: Sequence[dict[str, str]],
    *,
    allow_code_execution: bool = False,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """Run one completion of each HumanEval problem (Chen et al., arXiv 2107.03374) with its tests, each in a process of its own.

    Args:
        predictions (`Sequence[str]`): What follows each prompt: the body of the function, or the whole function again. Code, no Markdown.
        problems (`Sequence[dict]`): Rows of HumanEval, with their five fields.
        allow_code_execution (`bool`): Must be True: programs that a model wrote are run on this machine.
        limits (`Limits`, *optional*): For each program.

    Raises:
        [`OptionError`]: there is no completion, or nobody allowed to run them.
    """
    if not predictions:
        raise OptionError("A score must be computed over at least one text, but there is none.")
    if allow_code_execution is not True:
        raise OptionError(
            "This score runs programs that a model wrote, with your rights to files; the sandbox protects from accidents, not "
            "from attacks. It must be told so: pass `allow_code_execution=True`, best inside a container."
        )
    outcomes = [
        run_program(_program(completion, problem), limits)
        for completion, problem in zip(predictions, problems, strict=True)
    ]
    num_passed = sum(outcome.passed for outcome in outcomes)
    return {
        "pass_at_1": num_passed / len(outcomes),
        "pass_at_1_interval": wilson_interval(num_passed, len(outcomes)),
        "num_passed": num_passed,
        "num_problems": len(outcomes),
        "outcomes": [
            {"task_id": problem["task_id"], "passed": outcome.passed, "reason": outcome.reason}
            for problem, outcome in zip(problems, outcomes, strict=True)
        ],
        "is_network_cut": all(outcome.is_network_cut for outcome in outcomes),
    }


def _program(completion: str, problem: dict[str, str]) -> str:
    return f"{problem['prompt']}{completion}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"
