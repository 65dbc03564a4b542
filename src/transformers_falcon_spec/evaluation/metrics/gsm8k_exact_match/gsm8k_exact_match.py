"""Share of answers to GSM8K that end in the right number, with its interval."""

import re
from fractions import Fraction
from typing import Any

import datasets
import evaluate

from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.evaluation.metrics import require_rows
from transformers_falcon_spec.evaluation.summary import wilson_interval

INPUTS = """
Args:
    predictions: Answers, as text.
    references: Reference solutions, as text; a bare number will do.

Returns:
    exact_match: Share of predictions whose number equals the reference's, with exact_match_interval (95 %, Wilson).
    num_correct, num_answers: The counts behind it.
    scores: 1 or 0 for each prediction.
"""
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-\N{MINUS SIGN}])?[$€£]?"  # after a word or a bracket it means less, not minus
    r"(?P<value>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:/(?P<divisor>[0-9]+))?"
)
MARK = "####"
MOST_DIGITS = 60  # a model that repeats itself writes thousands; no answer has that many


class Gsm8kExactMatch(evaluate.Metric):  # type: ignore[misc]  # `evaluate` has no types
    """Numbers are compared as numbers: 1,000 and $1000.00 are the same answer."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            description="Share of answers that end in the number of the reference solution.",
            citation="Cobbe et al., Training Verifiers to Solve Math Word Problems (2021), arXiv 2110.14168",
            inputs_description=INPUTS,
            features=datasets.Features({name: datasets.Value("string") for name in ("predictions", "references")}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        require_rows(predictions)
        expected = [final_number(reference or "") for reference in references]
        if None in expected:
            row = expected.index(None)
            raise OptionError(f"A reference must hold a number, but row {row} has none: {references[row]!r:.200}")
        found = [final_number(prediction or "") for prediction in predictions]
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
