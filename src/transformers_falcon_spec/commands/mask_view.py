"""Showing which words of conversations count in the loss: they are coloured in the terminal."""

from itertools import groupby, islice

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..training.dataset import ConversationDataset

COUNTED, OTHER = "bold black on green", "dim"
BRACKETS = ("⟦", "⟧")  # around words that count, if the terminal has no colours
LEGEND = {True: "counts in the loss", False: "is read, but not learned"}


def show_masks(
    dataset: ConversationDataset, tokenizer: PreTrainedTokenizerBase, num_examples: int, console: Console | None = None
) -> None:
    """Print the first `num_examples` examples with the words that count marked, and totals of what was encoded."""
    console = console or Console(highlight=False)
    has_colors = console.color_system is not None
    for origin, example in islice(zip(dataset.origins, dataset.examples, strict=True), num_examples):
        ids, mask = example["input_ids"], example["assistant_mask"]
        console.print(Text(f"{origin}: {len(ids)} tokens, {sum(mask)} count", style="bold"), soft_wrap=True)
        text = Text()
        for is_counted, run in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
            words = _visible(str(tokenizer.decode([token for token, _ in run])))
            text.append_text(_marked(words, is_counted, has_colors))
        console.print(text, end="\n\n", soft_wrap=True)  # a terminal breaks lines by itself
    legend = [_marked(words, is_counted, has_colors) for is_counted, words in LEGEND.items()]
    console.print(Text("  ").join(legend))
    console.print(f"{dataset.coverage}.", markup=False, soft_wrap=True)


def _marked(words: str, is_counted: bool, has_colors: bool) -> Text:
    opening, closing = BRACKETS if is_counted and not has_colors else ("", "")
    return Text(f"{opening}{words}{closing}", style=COUNTED if is_counted else OTHER)


def _visible(text: str) -> str:
    """Mark line ends, so that their colour shows, and escape characters that would control the terminal."""
    shown = "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text)
    return shown.replace("\n", "↵\n")
