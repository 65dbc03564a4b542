"""Finding evaluation prompts in training data by shared runs of words, so that such rows are left out.

A conversation holds a prompt if one of its messages shares a run of 13 words with it; of a prompt with fewer words it
must hold all of them, and one with fewer than 8 must be the whole message, for "what is 2 plus 3" occurs anywhere. So
GPT-3 filtered its training data (arXiv 2005.14165, appendix C), with one length for each benchmark instead of one for
each prompt. A row too many costs little, one too few makes a measured acceptance length worthless. Paraphrases and
translations are not found.
"""

import logging
import unicodedata
from collections.abc import Iterable
from functools import cache
from itertools import product

from ..errors import ConversationError
from .conversations import ConversationSet
from .row_encoding import UnusableRowError

logger = logging.getLogger(__name__)

RUN_WORDS = 13  # a shared run of this many words is an overlap
MIN_RUN_WORDS = 8  # a prompt with fewer must be a whole message
REASON = "an evaluation prompt"  # why rows are left out

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


def without_overlaps(data: ConversationSet, index: OverlapIndex) -> ConversationSet:
    """The conversations that hold no forbidden text; the others are counted as left out, and the log names them.

    Raises:
        [`ConversationError`]: every conversation holds one.
    """
    found = set()
    for number, (row, origin) in enumerate(zip(data.rows, data.origins, strict=True)):
        hit = next(filter(None, (index.find(message["content"]) for message in row)), None)
        if hit is not None:
            found.add(number)
            text = f"a row must not hold an evaluation prompt, but it shares {hit[1]!r} with {hit[0]}."
            data.leave_out(origin, UnusableRowError(REASON, text))
    if found and len(found) == len(data.rows):
        raise ConversationError(
            f"Training data must hold more than evaluation prompts, but each of the {len(found)} conversations holds "
            f"one: {data.errors[-1]} Give other data, or leave the prompt file out of `--forbid`."
        )
    if found:
        logger.warning("Left out: %d of %d conversations hold evaluation prompts.", len(found), len(data.rows))
    return data.split(found, by_prompt=False)[0]
