"""The parity report: what is counted, and a page that is whole, safe and readable without anything else."""

import re
from dataclasses import asdict, replace
from typing import Any

from tests.pages import Outline
from transformers_falcon_spec.evaluation.pages import render
from transformers_falcon_spec.evaluation.parity import (
    Check,
    Choice,
    Difference,
    Float32Comparison,
    ParityResult,
    StepComparison,
    report_of,
)
from transformers_falcon_spec.provenance import provenance

ATTACK = "<script>alert('x')</script>&\"\u202e\n"
FLOAT32 = Float32Comparison(8, 0.02, 0.06, 0.07, unit=0.03)
EVIDENCE = StepComparison(0.0, 0.0625, 0.125, 1.1, True, False, FLOAT32)
DIFFERENCE = Difference(
    reason="Every check holds.",
    context=ATTACK,
    plain=Choice(7, ATTACK, ATTACK),
    drafted=Choice(8, "<b>", ""),
    checks=[Check("The texts repeat.", "they do", True), Check("Close <enough>.", "0.1 <= 0.2", True)],
    evidence=EVIDENCE,
    float32_token="<i>",
)
SAME = ParityResult("a", "sums", 12, "identical", decoding="greedy")
TIE = ParityResult("b", "sums", 5, "tie", 5, "greedy", DIFFERENCE)
ENDED = Difference("Ends early.", "x", Choice(3, "y", "z"), Choice(None, "", ""), [Check("Same end.", "no", False)])
BUG = ParityResult(ATTACK, "<sums>", 2, "bug", 2, "temperature-1", ENDED)


def make_report(*results: ParityResult, **origin: Any) -> dict[str, Any]:
    names = list(dict.fromkeys(result.decoding for result in results))
    settings = {"target": "t", "drafter": "d", "dtype": "bfloat16", "seed": 0, **origin}
    return report_of([asdict(result) for result in results], names, provenance(**settings))


def test_shares_come_with_intervals_and_a_prompt_counts_once_in_the_totals() -> None:
    again = replace(SAME, decoding="temperature-1")
    report = make_report(SAME, TIE, again, replace(TIE, decoding="temperature-1", verdict="bug"))

    greedy, totals = report["rows"][0], report["totals"]
    assert [greedy[key] for key in ("num_prompts", "num_tokens", "identical", "tie", "bug")] == [2, 17, 1, 1, 0]
    assert greedy["by_set"] == {"sums": {"identical": 1, "tie": 1, "bug": 0}}
    assert greedy["shares"]["tie"]["share"] == 0.5
    assert greedy["shares"]["tie"]["interval"][0] < 0.5 < greedy["shares"]["tie"]["interval"][1]
    assert [totals[key] for key in ("num_prompts", "num_texts", "identical", "tie", "bug")] == [2, 4, 1, 0, 1]


def test_tokens_a_step_are_those_of_identical_texts() -> None:
    report = make_report(replace(SAME, num_steps=4), replace(TIE, num_steps=99), replace(BUG, num_steps=1))

    assert [row["tokens_per_step"] for row in report["rows"]] == [3.0, None]


def test_the_page_shows_counts_tokens_and_numbers() -> None:
    page = Outline(render("parity.html", make_report(SAME, TIE, BUG)))

    text = re.sub(r"\s+", " ", page.text)
    assert "No: 1 of 3 prompts show a bug." in text
    assert "1 50.0 % (9.5 to 90.5 %)" in text
    assert 'writes "<i>" (id 8), as is written with the drafter; gap 0.02' in text
    assert "plain decoding is off by 0.06, the tree by 0.07" in text
    assert "its text ends here" in text
    assert text.index("bug: temperature-1") < text.index("proven tie: greedy")


def test_what_comes_from_models_and_prompts_is_escaped() -> None:
    source = render("parity.html", make_report(TIE, BUG, target="<script>", drafter="<script>"))
    page = Outline(source)

    tags = {tag for tag, _ in page.tags}
    assert tags.isdisjoint({"script", "b", "i", "sums", "enough"})
    assert "alert(" in page.text
    assert "\u202e" not in re.sub(r"<bdi>.*?</bdi>", "", source, flags=re.DOTALL)


def test_the_page_needs_nothing_else_and_names_its_headers() -> None:
    page = Outline(render("parity.html", make_report(SAME, TIE, BUG)))

    names = {name for _, attributes in page.tags for name in attributes}
    assert names.isdisjoint({"src", "href", "srcset", "onclick", "style"})
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert "url(" not in page.text
    assert "@import" not in page.text
    assert "prefers-color-scheme: dark" in page.text
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in page.tags if tag == "th")
    assert ("html", {"lang": "en"}) in page.tags
    num_tables = sum(tag == "table" for tag, _ in page.tags)
    assert num_tables == sum(tag == "caption" for tag, _ in page.tags)
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    labels = {attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes}
    assert len(identifiers) == len(set(identifiers))
    assert labels <= set(identifiers)


def test_a_page_without_differences_says_so() -> None:
    page = Outline(render("parity.html", make_report(SAME)))

    assert "Yes, token for token, on all 1 prompts." in page.text
    assert "There are none." in page.text
