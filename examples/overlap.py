"""Leave rows out of training data that hold evaluation prompts, found by shared runs of words.

Command: python examples/overlap.py --data prompts.jsonl --forbid benchmarks/prompts/*.jsonl --output clean.jsonl

A conversation holds a prompt if one of its messages shares a run of 13 words with it; of a prompt with fewer words it
must hold all of them, and one with fewer than 8 must be the whole message, for "what is 2 plus 3" occurs anywhere. So
GPT-3 filtered its training data (arXiv 2005.14165, appendix C), with one length for each benchmark instead of one for
each prompt. A row too many costs little, one too few makes a measured acceptance length worthless. Paraphrases and
translations are not found.
"""

import argparse
import json
import unicodedata
from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path

from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.training.conversations import read_conversations

RUN_WORDS = 13  # a shared run of this many words is an overlap
MIN_RUN_WORDS = 8  # a prompt with fewer must be a whole message

_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")  # scripts without spaces between words


@cache
def _spaced(character: str) -> str:
    """A space for punctuation and layout; a character of a script without spaces is a word."""
    if character != "_" and unicodedata.category(character)[0] in "PSZC":
        return " "
    return f" {character} " if unicodedata.name(character, "").startswith(_UNSPACED) else character


def words_of(text: str) -> tuple[str, ...]:
    r"""The words of a text, whose compatibility forms are unified (NFKC), without case, punctuation and layout.

    Example:

    ```python
    >>> words_of("Don't  stop:\n80,000 “Ducks”!")
    ('don', 't', 'stop', '80', '000', 'ducks')
    >>> words_of("2 只鸭子")
    ('2', '只', '鸭', '子')

    ```
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return tuple("".join(map(_spaced, folded)).split() or folded.split())  # a text of punctuation only keeps it


class OverlapIndex:
    """An index that finds forbidden texts inside others.

    Args:
        texts (`Iterable[tuple[str, str]]`): The forbidden texts, each with its origin in words.
    """

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self._whole: dict[tuple[str, ...], str] = {}  # short texts and their origins
        self._runs: dict[tuple[str, ...], str] = {}
        for text, origin in texts:
            words = words_of(text)
            if len(words) < MIN_RUN_WORDS:
                self._whole.setdefault(words, origin)
                continue
            length = min(len(words), RUN_WORDS)
            for start in range(len(words) - length + 1):
                self._runs.setdefault(words[start : start + length], origin)
        self._lengths = sorted(set(map(len, self._runs)))

    def find(self, text: str) -> tuple[str, str] | None:
        """The origin of the first forbidden text in `text` and the shared words, or None."""
        words = words_of(text)
        if words in self._whole:
            return self._whole[words], " ".join(words)
        runs = (words[start : start + length] for start, length in product(range(len(words)), self._lengths))
        found = next((run for run in runs if run in self._runs), None)
        return None if found is None else (self._runs[found], " ".join(found))


def main() -> None:
    """Write the conversations that hold no prompt, and print the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", nargs="+", required=True, help="conversations or questions, as `regenerate` reads them"
    )
    parser.add_argument("--forbid", nargs="+", required=True, help="prompt files, as `falcon-spec bench` takes them")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines file to write")
    args = parser.parse_args()

    forbidden = OverlapIndex(
        (content, prompt.origin)
        for prompt in read_prompts(args.forbid)
        for role, content in prompt.messages
        if role != "system"  # which prompts may share
    )
    data = read_conversations(args.data, needs_answers=False)
    clean = []
    for row, origin in zip(data.rows, data.origins, strict=True):
        hits = [hit for message in row if (hit := forbidden.find(message["content"])) is not None]
        if hits:
            print(f"Left out: {origin}: it shares {hits[0][1]!r} with {hits[0][0]}.")
        else:
            clean.append(json.dumps({"messages": row}) + "\n")

    args.output.write_text("".join(clean), encoding="utf-8")
    print(f"{len(clean)} of {len(data.rows)} conversations are in {args.output}")


if __name__ == "__main__":
    main()
