"""How often n-grams of token ids come: counted in bulk, found by binary search.

An n-gram of vocabulary V is kept under one whole number, its tokens as digits to the base V, so that one sorted tensor holds all of a
length and any number of them is looked up at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import OptionError

NONE = -1  # a token, or the key of an n-gram, that is not there
_LAST = torch.iinfo(torch.long).max  # stands behind all keys, so that every search ends inside
COUNT, FOLLOWED, KINDS = range(3)  # how often an n-gram comes, is followed by a token, and by how many different ones


@dataclass
class Level:
    """All n-grams of one length.

    Args:
        keys (`torch.Tensor` of shape `(ngrams + 1,)`, *optional*): In rising order, then one that nothing equals; None: all are there.
        stats (`torch.Tensor` of shape `(ngrams + 1, 1 or 3)`): `COUNT`, `FOLLOWED`, `KINDS`; the longest ones have the count alone.
    """

    keys: Tensor | None
    stats: Tensor

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Where n-grams of any shape stand in `stats`, and whether they are there at all."""
        if self.keys is None:
            return keys.clamp(min=0), keys >= 0
        places = torch.searchsorted(self.keys, keys)
        return places, self.keys[places] == keys

    def insert(self, keys: Tensor, stats: Tensor) -> None:
        """Take in those of `keys`, all different, that are not there yet."""
        is_new = ~self.find(keys)[1]
        if self.keys is None or not is_new.any():
            return
        together = torch.cat([self.keys, keys[is_new]])
        self.keys, order = together.sort()
        self.stats = torch.cat([self.stats, stats[is_new]])[order]

    def copy(self) -> "Level":
        """The same, to be changed apart."""
        return Level(None if self.keys is None else self.keys.clone(), self.stats.clone())


def empty_level(width: int) -> Level:
    """No n-gram, with so many numbers for each."""
    return Level(torch.tensor([_LAST]), torch.zeros(1, width, dtype=torch.int32))


def keys_of(tokens: Tensor, vocab_size: int) -> Tensor:
    """Keys `[...]` of n-grams `[..., n]`; negative where the first token is `NONE`."""
    keys = tokens.new_zeros(tokens.shape[:-1])
    for place in range(tokens.shape[-1]):
        keys = keys * vocab_size + tokens[..., place]
    return keys


def count_levels(token_sequences: Iterable[Sequence[int] | Tensor], order: int, vocab_size: int) -> list[Level]:
    """Levels of 0 to `order` tokens; no n-gram reaches over the end of a sequence.

    Raises:
        [`OptionError`]: a token that is not in the vocabulary.
    """
    texts = [torch.as_tensor(each, dtype=torch.long).flatten() for each in token_sequences]
    tokens = torch.cat([torch.zeros(0, dtype=torch.long), *texts])
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise OptionError(
            f"Token ids must lie from 0 to {vocab_size - 1}, but they lie from {int(tokens.min())} to {int(tokens.max())}. Take the "
            "vocabulary of the tokenizer that made them."
        )
    lengths = torch.tensor([len(text) for text in texts], dtype=torch.long)
    text_of = torch.repeat_interleave(torch.arange(len(texts)), lengths)
    levels = [Level(None, torch.zeros(1, 3, dtype=torch.int32))]
    for length in range(1, order + 1):
        num = max(len(tokens) - length + 1, 0)
        windows = tokens.unfold(0, length, 1) if num else torch.zeros(0, length, dtype=torch.long)
        is_one_text = text_of[:num] == text_of[length - 1 :]
        keys, counts = keys_of(windows[is_one_text], vocab_size).unique(return_counts=True)
        level = _level(keys, counts, vocab_size, is_dense=length == 1, is_longest=length == order)
        above = levels[-1]
        places = above.find(keys // vocab_size)[0]
        above.stats[:, FOLLOWED].index_add_(0, places, counts.int())
        above.stats[:, KINDS].index_add_(0, places, torch.ones_like(counts, dtype=torch.int32))
        levels.append(level)
    return levels


def _level(keys: Tensor, counts: Tensor, vocab_size: int, is_dense: bool, is_longest: bool) -> Level:
    size, width = vocab_size if is_dense else len(keys) + 1, 1 if is_longest else 3
    stats = torch.zeros(size, width, dtype=torch.int32)
    stats[keys if is_dense else torch.arange(len(keys)), COUNT] = counts.int()
    return Level(None if is_dense else torch.cat([keys, torch.tensor([_LAST])]), stats)
