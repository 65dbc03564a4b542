"""Finding evaluation prompts in training data by shared runs of words, so that such data is refused.

Texts are compared as words: compatibility forms unified (NFKC), case folded, punctuation and layout dropped. A
conversation holds a prompt if one of its messages shares a run of 13 words with it; of a prompt with fewer words it
must hold all of them, and one with fewer than 8 must be the whole message, for "what is 2 plus 3" occurs anywhere. Any
shared run counts, lower case and punctuation ignored, and 8 to 13 words are the lengths, as GPT-3 filtered its
training data (arXiv 2005.14165, appendix C); there one length is chosen for each benchmark, here it follows each
prompt. Chance hits are rare at 13 words and the data is large, so a row too many costs little, while one too few makes
a measured acceptance length worthless. Paraphrases and translations are not found.
"""

import logging
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ConversationError
from .conversations import ConversationSet

logger = logging.getLogger(__name__)

RUN_WORDS = 13  # a shared run of this many words is an overlap
MIN_RUN_WORDS = 8  # a prompt with fewer must be a whole message
NUM_NAMED = 10  # overlaps that the error names; the log names all

_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")  # scripts without spaces between words


class _Spacing(dict[int, str]):
    """A translation table, filled on use, of each character to itself, a space, or itself between spaces."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if character != "_" and unicodedata.category(character)[0] in "PSZC":
            spaced = " "
        elif unicodedata.name(character, "").startswith(_UNSPACED):
            spaced = f" {character} "
        else:
            spaced = character
        self[code] = spaced
        return spaced


_SPACING = _Spacing()


def words_of(text: str) -> tuple[str, ...]:
    r"""The normalised words of a text; in scripts without spaces every character is a word.

    Example:

    ```python
    >>> words_of("Don't  stop:\n80,000 “Ducks”!")
    ('don', 't', 'stop', '80', '000', 'ducks')
    >>> words_of("2 只鸭子")
    ('2', '只', '鸭', '子')

    ```
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return tuple(folded.translate(_SPACING).split() or folded.split())  # a text of punctuation only keeps it


@dataclass(frozen=True)
class Forbidden:
    """A text that training data must not hold, and where it comes from, in words."""

    text: str
    origin: str


@dataclass(frozen=True)
class Overlap:
    """A training row that shares words with a forbidden text.

    Args:
        row (`str`): Where the row comes from.
        origin (`str`): Where the forbidden text comes from.
        words (`str`): The words that they share.
    """

    row: str
    origin: str
    words: str


class OverlapIndex:
    """An index that finds forbidden texts inside others, with one lookup for each word.

    Args:
        texts (`Iterable[Forbidden]`): The forbidden texts.
    """

    def __init__(self, texts: Iterable[Forbidden]) -> None:
        self._short_texts: dict[tuple[str, ...], str] = {}  # short texts and their origins
        self._runs: dict[
            tuple[str, ...], dict[tuple[str, ...], str]
        ] = {}  # by their first `MIN_RUN_WORDS` words: runs and their origins
        for each in texts:
            words = words_of(each.text)
            if len(words) < MIN_RUN_WORDS:
                self._short_texts.setdefault(words, each.origin)
                continue
            length = min(len(words), RUN_WORDS)
            for start in range(len(words) - length + 1):
                run = words[start : start + length]
                self._runs.setdefault(run[:MIN_RUN_WORDS], {}).setdefault(run, each.origin)

    def find(self, text: str) -> tuple[str, str] | None:
        """The origin of the first forbidden text in `text` and the shared words, or None."""
        words = words_of(text)
        if words in self._short_texts:
            return self._short_texts[words], " ".join(words)
        for start in range(len(words) - MIN_RUN_WORDS + 1):
            for run, origin in self._runs.get(words[start : start + MIN_RUN_WORDS], {}).items():
                if words[start : start + len(run)] == run:
                    return origin, " ".join(run)
        return None


def find_overlaps(data: ConversationSet, index: OverlapIndex) -> list[Overlap]:
    """An overlap for each conversation with a forbidden text in one of its turns."""
    found = []
    for row, row_origin in zip(data.rows, data.origins, strict=True):
        hit = next(filter(None, (index.find(message["content"]) for message in row)), None)
        if hit is not None:
            found.append(Overlap(row_origin, *hit))
    return found


def refuse_overlaps(data: ConversationSet, index: OverlapIndex) -> None:
    """Refuse training data that holds forbidden texts.

    Raises:
        [`ConversationError`]: there are overlaps; the message names the first of them, the log all.
    """
    found = find_overlaps(data, index)
    lines = [f"{each.row} shares {each.words!r} with {each.origin}" for each in found]
    for line in lines:
        logger.warning("Forbidden: %s", line)
    if found:
        rest = f" and {len(found) - NUM_NAMED} more, which the log names" if len(found) > NUM_NAMED else ""
        raise ConversationError(
            f"Training data must not hold evaluation prompts, but {len(found)} of {len(data.rows)} conversations do: "
            f"{'; '.join(lines[:NUM_NAMED])}{rest}. Take these rows out."
        )
