"""Tokenizers of a few words, and models saved with them."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


def make_tokenizer(num_tokens: int, mask: str | None = None, **changes: int) -> PreTrainedTokenizerFast:
    """Tokens `word0`, `word1` and so on; `changes` are further tokens with their ids, of which `mask` is the mask."""
    words = {f"word{number}": number for number in range(num_tokens) if number not in changes.values()}
    model = WordLevel({**words, **changes}, unk_token="word0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), mask_token=mask)


def saved(model: Any, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    """The folder, which afterwards holds the model."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)
