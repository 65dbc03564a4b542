"""The text and the bytes of single tokens, of which several may make one character."""

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .growing_text import INCOMPLETE

_BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}  # as byte-level tokens are spelled
_FALLBACKS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


class TokenTexts:
    """What single tokens add to a text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Decodes; it must not be in use on another thread.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._word = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]

    def of(self, token_id: int, is_first: bool) -> tuple[str, bytes | None]:
        """Text and bytes of a token; some tokenizers leave the space out with which the first one begins."""
        before = [] if is_first else self._word
        known = str(self._tokenizer.decode(before))
        text = str(self._tokenizer.decode([*before, token_id])).removeprefix(known)
        spelling = str(self._tokenizer.convert_ids_to_tokens(token_id))
        return text, bytes_of(spelling, text)


def bytes_of(spelling: str, text: str) -> bytes | None:
    """The bytes of a token with this spelling in the vocabulary; None where neither it nor the text tells them."""
    if INCOMPLETE not in text:
        return text.encode()
    if spelling in _FALLBACKS:
        return _FALLBACKS[spelling]
    if not all(letter in _BYTE_OF for letter in spelling):
        return None

    found = bytes(_BYTE_OF[letter] for letter in spelling)
    return found if found.decode(errors="replace") == text else None
