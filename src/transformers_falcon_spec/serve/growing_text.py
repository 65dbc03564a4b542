"""The text of tokens as they come, in pieces of whole characters that no stop string can take back."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # what bytes decode to that are no whole character yet


class GrowingText:
    """Decodes tokens one by one, and ends before the first of the `stop` strings.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Decodes; it must not be in use on another thread.
        stop (`Sequence[str]`): Strings before which the text ends.
        skip_special_tokens (`bool`): Leave special tokens out.

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

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        self.token_ids: list[int] = []
        self.is_stopped = False  # a stop string came
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._stops = stop
        self._start = self._read = 0  # tokens from `_start` are decoded together; those before `_read` have been read
        self._shown = ""
        self._held = ""  # what may become part of a stop string

    def add(self, token_id: int) -> str:
        """Take in a token; returns the new piece of text, which is often empty."""
        self.token_ids.append(token_id)
        new = self._new_text()
        if not new or new.endswith(INCOMPLETE):
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
        return str(self._tokenizer.decode(self.token_ids[start:end], skip_special_tokens=self._skips_special))

    def _released(self, new: str) -> str:
        """What of the held and the new text can be shown."""
        text = self._held + new
        starts = [text.find(stop) for stop in self._stops if stop in text]
        self.is_stopped = bool(starts)

        if self.is_stopped:
            shown = min(starts)
        else:
            shown = len(text) - max((num_open(text, stop) for stop in self._stops), default=0)

        self._held = text[shown:]
        self._shown += text[:shown]

        return text[:shown]


def num_open(text: str, stop: str) -> int:
    """With how many characters of a stop string, from its first one, a text ends."""
    for num in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:num]):
            return num
    return 0
