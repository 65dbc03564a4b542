"""The mask viewer shows exactly what counts in the loss."""

import contextlib
import io
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chat import MARKED_TEMPLATE, make_rows, make_tokenizer
from transformers_falcon_spec.commands.train_report import print_masks
from transformers_falcon_spec.training.dataset import ConversationDataset

pytestmark = pytest.mark.benchmarks

ROWS = [
    [
        {"role": "user", "content": "one plus one is"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "times three"},
        {"role": "assistant", "content": "six minus two"},
    ],
    *make_rows(3),
]


@pytest.fixture
def dataset() -> ConversationDataset:
    return ConversationDataset(ROWS, make_tokenizer(MARKED_TEMPLATE), 200, [f"line {index}" for index in range(4)])


def shown(dataset: ConversationDataset, num_examples: int, tokenizer: Any = None) -> str:
    """What is printed."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        print_masks(dataset, tokenizer or make_tokenizer(), num_examples)
    return stream.getvalue()


def test_what_counts_stands_in_brackets_and_nothing_else(dataset: ConversationDataset) -> None:
    text = shown(dataset, 1)

    line = text.splitlines()[1]
    assert line == ("<user>one plus one is</s><assistant>⟦two</s>⟧<user>times three</s><assistant>⟦six minus two</s>⟧")
    assert "⟦counts in the loss⟧  is read, but not learned" in text


@pytest.mark.parametrize(("num_examples", "num_shown"), [(1, 1), (3, 3), (9, 4)])
def test_at_most_so_many_examples_are_shown_with_their_origin(
    dataset: ConversationDataset, num_examples: int, num_shown: int
) -> None:
    text = shown(dataset, num_examples)

    heads = [line for line in text.splitlines() if line.startswith("line ")]
    assert heads == [
        f"line {index}: {len(dataset[index]['input_ids'])} tokens, {sum(dataset[index]['assistant_mask'])} count"
        for index in range(num_shown)
    ]
    assert text.splitlines()[-1] == f"{dataset.coverage}."


def test_a_text_cannot_steer_the_terminal(dataset: ConversationDataset) -> None:
    tokenizer = SimpleNamespace(decode=lambda _: "a\x1b[31mb\r\nc [bold]d")

    text = shown(dataset, 1, tokenizer=tokenizer)

    assert "a\\x1b[31mb\\r\nc [bold]d" in text
    assert "\x1b" not in text
