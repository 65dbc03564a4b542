"""The parity report: what is counted."""

from dataclasses import asdict, replace
from typing import Any

from transformers_falcon_spec.evaluation.parity import (
    Check,
    Difference,
    ParityResult,
    report_of,
)
from transformers_falcon_spec.provenance import provenance

DIFFERENCE = Difference(
    reason="Every check holds.",
    plain={"token_id": 7, "token": " two"},
    drafted={"token_id": 8, "token": " three"},
    checks=[Check("The texts repeat.", "they do", True), Check("Close <enough>.", "0.1 <= 0.2", True)],
)
SAME = ParityResult("a", "sums", 12, "identical", decoding="greedy")
TIE = ParityResult("b", "sums", 5, "tie", 5, "greedy", DIFFERENCE)
MORE, END = {"token_id": 3, "token": "y"}, {"token_id": None, "token": ""}
ENDED = Difference("Ends early.", MORE, END, [Check("Same end.", "no", False)])
BUG = ParityResult("c", "sums", 2, "bug", 2, "temperature-1", ENDED)


def make_report(*results: ParityResult, **origin: Any) -> dict[str, Any]:
    names = list(dict.fromkeys(result.decoding for result in results))
    settings = {"target": "t", "drafter": "d", "dtype": "bfloat16", "seed": 0, **origin}
    return report_of([asdict(result) for result in results], names, provenance(**settings))


def test_shares_come_with_intervals() -> None:
    again = replace(SAME, decoding="temperature-1")
    report = make_report(SAME, TIE, again, replace(TIE, decoding="temperature-1", verdict="bug"))

    greedy = report["rows"][0]
    assert [greedy[key] for key in ("num_prompts", "num_tokens", "identical", "tie", "bug")] == [2, 17, 1, 1, 0]
    assert greedy["shares"]["tie"]["share"] == 0.5
    assert greedy["shares"]["tie"]["interval"][0] < 0.5 < greedy["shares"]["tie"]["interval"][1]


def test_tokens_a_step_are_those_of_identical_texts() -> None:
    report = make_report(replace(SAME, num_steps=4), replace(TIE, num_steps=99), replace(BUG, num_steps=1))

    assert [row["tokens_per_step"] for row in report["rows"]] == [3.0, None]
