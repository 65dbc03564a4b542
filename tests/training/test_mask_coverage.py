"""Tokens that count in the loss are counted correctly, and a mask that looks wrong is reported."""

import logging

import pytest

from tests.chat import MARKED_TEMPLATE, PLAIN_TEMPLATE, make_rows, make_tokenizer
from transformers_falcon_spec.errors import TrainingError
from transformers_falcon_spec.training.dataset import ConversationDataset, MaskCoverage

LONG = 200
LAST_ONLY_TEMPLATE = MARKED_TEMPLATE.replace("['role'] == 'assistant'", "['role'] == 'assistant' and loop.last")
MARKING_NOTHING_TEMPLATE = PLAIN_TEMPLATE + "{% generation %}{% endgeneration %}"
REFUSING_TEMPLATE = "{{ raise_exception('no') }}"


def two_turns(num_rows: int) -> list[list[dict[str, str]]]:
    return [first + second for first, second in zip(make_rows(num_rows), make_rows(num_rows, seed=1), strict=True)]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE], ids=["found by turns", "marked"])
@pytest.mark.parametrize("max_length", [LONG, 30])
def test_tokens_turns_and_cut_tokens_are_counted(template: str, max_length: int) -> None:
    rows, tokenizer = two_turns(4), make_tokenizer(template)
    whole = list(ConversationDataset(rows, tokenizer, LONG))

    coverage = ConversationDataset(rows, tokenizer, max_length).coverage

    cut = [example["assistant_mask"][:max_length] for example in whole]
    num_counted = sum(map(sum, cut))
    assert coverage == MaskCoverage(
        num_examples=4,
        num_tokens=sum(map(len, cut)),
        num_counted=num_counted,
        num_beyond=sum(sum(example["assistant_mask"]) for example in whole) - num_counted,
        num_turns=8,
        num_runs=8,
    )
    assert coverage.share == num_counted / sum(map(len, cut))
    assert (coverage.num_beyond > 0) == ("beyond the greatest length" in str(coverage)) == (max_length < LONG)


def test_rows_without_a_counted_token_are_no_part_of_the_share() -> None:
    long_prompt = [{"role": "user", "content": "one " * 30}, {"role": "assistant", "content": "two"}]
    (row,) = make_rows(1)

    alone = ConversationDataset([row], make_tokenizer(), 20).coverage
    together = ConversationDataset([row, long_prompt], make_tokenizer(), 20).coverage

    assert (together.num_examples, together.share) == (1, alone.share)
    assert together.num_beyond > alone.num_beyond
    assert (together.num_turns, together.num_runs) == (2, 2)


@pytest.mark.parametrize(("num_words", "is_low"), [(40, True), (4, False)])
def test_a_low_share_is_reported(num_words: int, is_low: bool, caplog: pytest.LogCaptureFixture) -> None:
    row = [{"role": "user", "content": "one " * num_words}, {"role": "assistant", "content": "two"}]

    share = ConversationDataset([row], make_tokenizer(), LONG).coverage.share

    assert (share < 0.1) == is_low
    assert (f"Only {100 * share:.1f}% of the tokens count in the loss" in caplog.text) == is_low


@pytest.mark.parametrize(("template", "num_runs"), [(LAST_ONLY_TEMPLATE, 3), (MARKED_TEMPLATE, 6)])
def test_a_template_that_marks_only_some_turns_is_reported(
    template: str, num_runs: int, caplog: pytest.LogCaptureFixture
) -> None:
    coverage = ConversationDataset(two_turns(3), make_tokenizer(template), LONG).coverage

    assert (coverage.num_turns, coverage.num_runs) == (6, num_runs)
    assert ("has 6 turns, but the mask has 3 runs of counted tokens" in caplog.text) == (num_runs == 3)


def test_the_report_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        dataset = ConversationDataset(make_rows(3), make_tokenizer(), LONG)

    assert f"{dataset.coverage}; of 3 rows: 3 whole (100%)." in caplog.text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (MARKING_NOTHING_TEMPLATE, "put `{% generation %}` marks around"),
        (REFUSING_TEMPLATE, r"3 rows: 3 left out \(100%: 3 refused by the chat template\)"),
    ],
    ids=["marks nothing", "refuses all"],
)
def test_a_mask_of_0_percent_is_refused_with_its_reason(template: str, text: str) -> None:
    with pytest.raises(TrainingError, match=text):
        ConversationDataset(make_rows(3), make_tokenizer(template), LONG)


def test_origins_are_those_of_the_examples_that_are_left() -> None:
    long_prompt = [{"role": "user", "content": "one " * 30}, {"role": "assistant", "content": "two"}]
    rows = [*make_rows(1), long_prompt, *make_rows(1, seed=1)]

    named = ConversationDataset(rows, make_tokenizer(), 20, ["a", "b", "c"])

    assert named.origins == ["a", "c"]
    assert ConversationDataset(rows, make_tokenizer(), 20).origins == ["row 0", "row 2"]
