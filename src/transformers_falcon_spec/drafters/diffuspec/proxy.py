"""The causal proxy: a counted n-gram model over token ids, which says how well tokens follow one another.

Interpolated Witten-Bell smoothing: with c(h, w) counted after the history h, N(h) in all and T(h) different tokens,
p(w | h) = (c(h, w) + T(h) p(w | h')) / (N(h) + T(h)), where h' is h without its oldest token and the last resort is 1 / V. It needs no
held-out text, is a distribution at once, and can be counted on while text is written. Sources: Witten and Bell 1991 (method C), in
the interpolated form of Chen and Goodman 1998, section 2.6. The paper (arXiv 2510.02358) takes 3-grams of KenLM; no maintained library
scores token ids in bulk: KenLM must be built and reads words, the models of NLTK look up one word at a time.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...errors import OptionError
from .ngram_counts import COUNT, FOLLOWED, KINDS, NONE, Level, count_levels, empty_level, keys_of
from .proxy_files import read_levels, write_levels

LONGEST_ORDER = 3
LARGEST_VOCAB = 2**21  # three tokens then fit one 64-bit number


@dataclass(frozen=True)
class LatticeLogProbs:
    """What the proxy gives each candidate of a lattice after each two that may stand before it; what is alike is kept once.

    Args:
        rows (`torch.Tensor` of shape `(rows, candidates)`): Log-probabilities of all candidates of one place after one history.
        places (`torch.Tensor` of shape `(rows,)`): The place of each row.
        index (`torch.Tensor` of shape `(places, candidates, candidates)`):
            The row for a place after candidate `a` two places and candidate `b` one place before; 0 where those are the text.
    """

    rows: Tensor
    places: Tensor
    index: Tensor


class NgramProxy:
    """Log-probabilities of tokens after up to two others; made by [`NgramProxy.fit`] or [`NgramProxy.load`] and never changed.

    Example:

    ```python
    >>> proxy = NgramProxy.fit([[1, 2, 3, 1, 2]], order=2, vocab_size=4)
    >>> proxy.log_probs(torch.tensor([[2]]), torch.tensor([[0, 1, 2, 3]])).exp().tolist()
    [[0.046875, 0.171875, 0.171875, 0.609375]]

    ```
    """

    def __init__(self, layers: list[list[Level]], vocab_size: int) -> None:
        """`layers[n]` holds levels of n tokens; what a later one knows of an n-gram counts."""
        self._layers, self.vocab_size = layers, vocab_size

    @staticmethod
    def fit(token_sequences: Iterable[Sequence[int] | Tensor], order: int, vocab_size: int) -> "NgramProxy":
        """The model of a text; that of no text at all finds every token as likely as any other.

        Args:
            token_sequences (`Iterable`): Texts as token ids, one after the other; no n-gram reaches from one into the next.
            order (`int`): Longest n-gram, from 1 to 3; the paper takes 3.
            vocab_size (`int`): Size of the target's vocabulary.

        Raises:
            [`OptionError`]: an order or a vocabulary out of range, or a token outside of the vocabulary.
        """
        if not 1 <= order <= LONGEST_ORDER or not 1 <= vocab_size <= LARGEST_VOCAB:
            raise OptionError(
                f"`order` must lie from 1 to {LONGEST_ORDER} and `vocab_size` from 1 to {LARGEST_VOCAB}, but they are {order} and "
                f"{vocab_size}."
            )
        return NgramProxy([[level] for level in count_levels(token_sequences, order, vocab_size)], vocab_size)

    @staticmethod
    def load(folder: str | Path) -> "NgramProxy":
        """The model that [`NgramProxy.save`] wrote.

        Raises:
            [`CheckpointError`]: a file is missing, cut short, changed, or of another version.
        """
        levels, vocab_size = read_levels(Path(folder))
        return NgramProxy([[level] for level in levels], vocab_size)

    def save(self, folder: str | Path) -> None:
        """Write it as safetensors beside a description with the checksum; what a context has added is not for keeping.

        Raises:
            [`OptionError`]: this is the model of a context.
        """
        if any(len(found) > 1 for found in self._layers):
            raise OptionError(
                "A fitted proxy can be saved, but this one belongs to a context. Save the one it came from."
            )
        write_levels(Path(folder), [found[0] for found in self._layers], self.vocab_size)

    @property
    def order(self) -> int:
        """Longest n-gram."""
        return len(self._layers) - 1

    @property
    def fingerprint(self) -> str:
        """Tells fitted proxies apart."""
        found = hashlib.blake2b(f"{self.vocab_size}".encode(), digest_size=8)
        for level in itertools.chain(*self._layers):
            for counts in (level.keys, level.stats):
                found.update(b"" if counts is None else counts.contiguous().numpy().tobytes())
        return found.hexdigest()

    def in_context(self) -> "ContextProxy":
        """A model that starts out as this one and learns from the text of one call; this one stays as it is."""
        return ContextProxy(self)

    def log_probs(self, histories: Tensor, candidates: Tensor) -> Tensor:
        """Log-probabilities `[beams, candidates]`, float64, each beam's candidates after its own history.

        Args:
            histories (`torch.Tensor` of shape `(beams, tokens)`): At least `order - 1` tokens, the newest last; -1 before the text.
            candidates (`torch.Tensor` of shape `(beams, candidates)`): Tokens to judge.
        """
        found = self._uniform(candidates)
        for length in range(self.order):
            contexts = keys_of(histories[:, histories.shape[1] - length :], self.vocab_size)
            found = self._interpolated(length, contexts, candidates, found)
        return found.log()

    def over_lattice(self, token_ids: Tensor, num: Tensor, history: Sequence[int]) -> LatticeLogProbs:
        """What `log_probs` says of every candidate of a lattice, in as many look-ups for all of its paths as for one.

        Args:
            token_ids (`torch.Tensor` of shape `(places, candidates)`): The lattice.
            num (`torch.Tensor` of shape `(places,)`): Candidates at each place; the rest is never looked up as history.
            history (`Sequence[int]`): The newest tokens of the text, the newest last; two are read.
        """
        num_places, width = token_ids.shape
        all_places = torch.arange(num_places)
        before, two_before = _histories(token_ids, num, history)
        found = self._interpolated(0, torch.zeros_like(all_places), token_ids, self._uniform(token_ids))
        if self.order == 1:
            return LatticeLogProbs(found.log(), all_places, all_places[:, None, None].expand(-1, width, width))
        places = all_places.repeat_interleave(width)
        found = self._interpolated(1, before.flatten(), token_ids[places], found[places])
        index = torch.arange(len(places)).reshape(num_places, 1, width).expand(-1, width, -1)
        if self.order == 2:  # noqa: PLR2004  bigrams
            return LatticeLogProbs(found.log(), places, index)
        contexts = two_before[:, :, None] * self.vocab_size + before[:, None, :]
        contexts = contexts.where(before[:, None, :] >= 0, NONE)
        is_seen = self._stats(2, contexts)[..., FOLLOWED] > 0  # the others say what their newer token alone says
        contexts, shorter, seen_places = contexts[is_seen], index[is_seen], is_seen.nonzero()[:, 0]
        longest = self._interpolated(2, contexts, token_ids[seen_places], found[shorter])
        index = index.masked_scatter(is_seen, torch.arange(len(places), len(places) + len(contexts)))
        return LatticeLogProbs(torch.cat([found, longest]).log(), torch.cat([places, seen_places]), index)

    def _interpolated(self, length: int, contexts: Tensor, candidates: Tensor, shorter: Tensor) -> Tensor:
        """Probabilities `[beams, candidates]` after contexts of `length` tokens `[beams]`, by those after shorter ones."""
        context = self._stats(length, contexts)[..., None]
        followed, kinds = context[:, FOLLOWED], context[:, KINDS]
        counts = self._stats(length + 1, contexts[:, None] * self.vocab_size + candidates)[..., COUNT]
        return ((counts + kinds * shorter) / (followed + kinds)).where(followed > 0, shorter)

    def _stats(self, length: int, keys: Tensor) -> Tensor:
        """Counts `[..., 1 or 3]` of n-grams `[...]`; 0 where they never came."""
        first, *later = self._layers[length]
        places, is_there = first.find(keys)
        found = first.stats[places] * is_there[..., None]
        for level in later:
            places, is_there = level.find(keys)
            found = torch.where(is_there[..., None], level.stats[places], found)
        return found

    def _uniform(self, candidates: Tensor) -> Tensor:
        return torch.full(candidates.shape, 1 / self.vocab_size, dtype=torch.double)


class ContextProxy(NgramProxy):
    """A proxy that goes on counting while one text is written; made by [`NgramProxy.in_context`].

    It says what a proxy fitted to that text as well would say. Of the shared one it copies the counts of single tokens, and of longer
    n-grams those that come.

    Example:

    ```python
    >>> proxy = NgramProxy.fit([], order=2, vocab_size=4).in_context()
    >>> proxy.update([1, 2, 3])
    >>> proxy.update([1, 2])
    >>> proxy.log_probs(torch.tensor([[2]]), torch.tensor([[3]])).exp().tolist()
    [[0.609375]]

    ```
    """

    def __init__(self, proxy: NgramProxy) -> None:
        layers = [
            [level.copy() for level in found] if length <= 1 else [*found, empty_level(found[0].stats.shape[1])]
            for length, found in enumerate(proxy._layers)
        ]
        super().__init__(layers, proxy.vocab_size)
        self._newest: list[int] = []  # what n-grams of coming tokens may begin with

    def update(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the text."""
        num_before, text = len(self._newest), [*self._newest, *token_ids]
        tokens = torch.tensor(text, dtype=torch.long)
        for length in range(1, self.order + 1):
            fresh = tokens[max(num_before - length + 1, 0) :]  # n-grams that end in a new token
            if token_ids and len(fresh) >= length:
                self._count(length, keys_of(fresh.unfold(0, length, 1), self.vocab_size))
        self._newest = text[len(text) - self.order + 1 :] if self.order > 1 else []

    def _count(self, length: int, keys: Tensor) -> None:
        keys, counts = keys.unique(return_counts=True)
        known = self._stats(length, keys)
        own, above = self._layers[length][-1], self._layers[length - 1][-1]
        own.insert(keys, known)
        own.stats[own.find(keys)[0], COUNT] += counts.int()
        places = above.find(keys // self.vocab_size)[0]  # it came one token earlier
        above.stats[:, FOLLOWED].index_add_(0, places, counts.int())
        above.stats[:, KINDS].index_add_(0, places, (known[:, COUNT] == 0).int())


def _histories(token_ids: Tensor, num: Tensor, history: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What may stand one and two places before each place `[places, candidates]`; `NONE` where nothing does."""
    width = token_ids.shape[1]
    newest = [NONE, NONE, *history][-2:]
    text = token_ids.new_tensor([[token] + [NONE] * (width - 1) for token in newest])
    kept = token_ids.where(torch.arange(width) < num[:, None], NONE)
    together = torch.cat([text, kept])
    return together[1:-1], together[:-2]
