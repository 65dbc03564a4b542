"""The mask viewer shows, with and without colours, exactly what counts in the loss."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from tests.chat import MARKED_TEMPLATE, make_rows, make_tokenizer
from transformers_falcon_spec.commands.mask_view import show_masks
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


def shown(dataset: ConversationDataset, num_examples: int, has_colors: bool, tokenizer: Any = None) -> str:
    """What a terminal with or without colours gets."""
    stream = io.StringIO()
    colors: Any = {"force_terminal": True, "color_system": "standard"} if has_colors else {"color_system": None}
    console = Console(file=stream, width=500, highlight=False, no_color=False, **colors)
    show_masks(dataset, tokenizer or make_tokenizer(), num_examples, console)
    return stream.getvalue()


def test_what_counts_is_in_green_and_nothing_else(dataset: ConversationDataset) -> None:
    line = Text.from_ansi(shown(dataset, 1, has_colors=True).splitlines()[1])

    green = [line.plain[span.start : span.end] for span in line.spans if "on color(2)" in str(span.style)]
    assert line.plain == (
        "<user>one plus one is</s><assistant>two</s><user>times three</s><assistant>six minus two</s>"
    )
    assert green == ["two</s>", "six minus two</s>"]


def test_without_colours_what_counts_stands_in_brackets(dataset: ConversationDataset) -> None:
    text = shown(dataset, 1, has_colors=False)

    assert "<assistant>⟦two</s>⟧<user>times three</s><assistant>⟦six minus two</s>⟧\n" in text
    assert "⟦counts in the loss⟧  is read, but not learned" in text


@pytest.mark.parametrize(("num_examples", "num_shown"), [(1, 1), (3, 3), (9, 4)])
def test_at_most_so_many_examples_are_shown_with_their_origin(
    dataset: ConversationDataset, num_examples: int, num_shown: int
) -> None:
    text = shown(dataset, num_examples, has_colors=False)

    heads = [line for line in text.splitlines() if line.startswith("line ")]
    assert heads == [
        f"line {index}: {len(dataset[index]['input_ids'])} tokens, {sum(dataset[index]['assistant_mask'])} count"
        for index in range(num_shown)
    ]
    assert text.splitlines()[-1] == f"{dataset.coverage}."


def test_a_text_cannot_steer_the_terminal(dataset: ConversationDataset) -> None:
    tokenizer = SimpleNamespace(decode=lambda _: "a\x1b[31mb\r\nc [bold]d")

    text = shown(dataset, 1, has_colors=False, tokenizer=tokenizer)

    assert "a\\x1b[31mb\\r↵\nc [bold]d" in text
    assert "\x1b" not in text
