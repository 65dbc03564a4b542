"""The text of tokens as they come, in pieces of whole characters that no stop string can take back."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"  # what bytes decode to that are no whole character yet


class GrowingText:
    """Decodes tokens one by one, and ends before the first of the `stop` strings.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Decodes; it must not be in use on another thread.
        stop (`Sequence[str]`): Strings before which the text ends.

    Example:

    ```python
    >>> class Letters:
    ...     def decode(self, ids, skip_special_tokens):
    ...         return "".join(map(chr, ids))
    >>> text = GrowingText(Letters(), ["end"])
    >>> [text.add(ord(letter)) for letter in "be end"], text.is_stopped, text.whole
    (['b', '', 'e ', '', '', ''], True, 'be ')

    ```
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self.token_ids: list[int] = []
        self.is_stopped = False  # a stop string came
        self._tokenizer, self._stops = tokenizer, [StopString(each) for each in stop]
        self._start = self._read = 0  # tokens from `_start` are decoded together; those before `_read` have been read
        self._shown = self._held = ""  # held is what may become part of a stop string

    def add(self, token_id: int) -> str:
        """Take in a token; returns the new piece of text, which is often empty."""
        self.token_ids.append(token_id)
        new = self._new_text()
        if not new or new.endswith(_INCOMPLETE):
            return ""
        self._start, self._read = self._read, len(self.token_ids)
        return self._released(new)

    def end(self) -> str:
        """The last piece: what was held back. The text grows no more."""
        if self.is_stopped:
            return ""
        piece = self._released(self._new_text()) + ("" if self.is_stopped else self._held)
        self._start = self._read = len(self.token_ids)
        self._held = ""
        return piece

    @property
    def whole(self) -> str:
        """All text, as one call of the tokenizer decodes it, up to the stop string."""
        if self.is_stopped or not self.token_ids:
            return self._shown
        return self._decoded(0, len(self.token_ids))

    def _new_text(self) -> str:
        """What the tokens that have not been read add to the text before them."""
        known = self._decoded(self._start, self._read)
        return self._decoded(self._start, len(self.token_ids))[len(known) :]

    def _decoded(self, start: int, end: int) -> str:
        return str(self._tokenizer.decode(self.token_ids[start:end], skip_special_tokens=True))

    def _released(self, new: str) -> str:
        """What of the held and the new text can be shown."""
        text = self._held + new
        starts = []
        for stop in self._stops:
            end = stop.end_in(new)
            if end is not None:
                starts.append(len(self._held) + end - len(stop.string))

        self.is_stopped = bool(starts)
        num_open = max((stop.num_open for stop in self._stops), default=0)
        shown = min(starts) if starts else len(text) - num_open
        self._held = text[shown:]
        self._shown += text[:shown]
        return text[:shown]


class StopString:
    """Follows a text as it grows: where `string` ends in it, and with how much of `string` the text ends.

    Each character is looked at once, however long the string is (Knuth, Morris and Pratt, 1977).
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_open = 0  # characters of the string, from its first one, with which the text ends
        self._shorter = [0]  # for the first 1, 2, .. characters: the longest beginning that also ends them
        for character in string[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def end_in(self, new: str) -> int | None:
        """Take in new text; returns behind which of its characters the string ends first, if it does."""
        for end, character in enumerate(new, start=1):
            self.num_open = self._longer(self.num_open, character)
            if self.num_open == len(self.string):
                return end
        return None

    def _longer(self, num_open: int, character: str) -> int:
        """How many characters are open after one more."""
        while num_open and self.string[num_open] != character:
            num_open = self._shorter[num_open - 1]
        return num_open + (self.string[num_open] == character)
