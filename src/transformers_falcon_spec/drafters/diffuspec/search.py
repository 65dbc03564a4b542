"""The search over what a denoising pass says: candidates of each position, a causal proxy, paths and trees.

One pass gives every position a distribution that knows nothing of its neighbours' tokens, so what can be drafted is a
lattice: a list of candidates for each position, the fewest tokens that hold most of the probability, any of which may
follow any of the position before. The best ones need not follow from one another, so causal-consistency path search
weighs them with a model that reads from left to right: `model_weight * log p(drafter) + (1 - model_weight) * log
p(proxy)`, summed over a path, by a beam (arXiv 2510.02358, section 3.2).

The proxy is a counted n-gram model with interpolated Witten-Bell smoothing: with c(h, w) counted after the history h,
N(h) in all and T(h) different tokens, p(w | h) = (c(h, w) + T(h) p(w | h')) / (N(h) + T(h)), where h' is h without
its oldest token and the last resort is 1 / V. It needs no held-out text, is a distribution at once, and can be
counted on while text is written. Sources: Witten and Bell 1991 (method C), in the interpolated form of Chen and
Goodman 1998, section 2.6. The paper takes 3-grams of KenLM, which needs a C++ build, reads words and cannot count on.
A search asks for a dozen tokens after a few contexts, so each context has a dictionary of what followed it (searching
sorted tensors took about twenty times as long: lab/log/rivals.md, 2026-11-22).

A path or tree found here is no draw: it follows from the lattice alone. No verifier is told that it was drawn from
something, for handing over the marginals of a searched path would bias the text.
"""

import hashlib
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import log
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.hub import cached_file

from ...core.verification import TokenTree
from ...errors import OptionError
from ..checkpoint import base_of_adapter, let_others_read, options_of_base, readable


@dataclass(frozen=True)
class Lattice:
    """Candidates of one row at each drafted position, best first; or of all rows, which then come first."""

    end_ids: tuple[int, ...]  # tokens that end the text
    token_ids: Tensor  # [positions, candidates] those that were pruned stand behind the rest
    log_probs: Tensor  # [positions, candidates] by the softmax over all allowed tokens; -inf where pruned
    num: Tensor  # [positions] candidates kept, at least 1
    end_log_probs: Tensor  # [positions] of the likeliest token that ends the text, kept or not

    @property
    def num_generated(self) -> int:
        """Positions before the first one whose best candidate ends the text; all of them if there is none."""
        is_end = torch.isin(self.token_ids[:, 0], self.token_ids.new_tensor(self.end_ids))
        return int((~is_end).long().cumprod(dim=0).sum())

    @property
    def length(self) -> int:
        """Positions to draft for: up to and including the first one whose best candidate ends the text."""
        return min(self.num_generated + 1, len(self.num))

    def __getitem__(self, place: int | slice) -> "Lattice":
        """That of one row, where there are several; of one row some of the positions."""
        return Lattice(
            self.end_ids,
            self.token_ids[place],
            self.log_probs[place],
            self.num[place],
            self.end_log_probs[place],
        )


def prune(scores: Tensor, mass: float = 0.8, max_candidates: int = 15, end_ids: Sequence[int] = ()) -> Lattice:
    """At each position the fewest tokens that hold at least `mass`, but no more than `max_candidates`.

    A token that ends the text enters like any other: where it is the best one it is always kept.

    `scores` `[..., positions, vocab]` are those of the denoising pass, -inf at tokens that must not be drafted. A mass
    of 1 keeps `max_candidates` everywhere; the paper finds 0.8 and 15 best.

    ```python
    >>> lattice = prune(torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]]).log(), mass=0.8, max_candidates=2)
    >>> lattice.token_ids.tolist(), lattice.num.tolist()
    ([[0, 1], [1, 0]], [2, 2])

    ```
    """
    scores = scores.float()
    best = scores.topk(min(max_candidates, scores.shape[-1]), dim=-1)
    total = scores.logsumexp(dim=-1, keepdim=True)
    log_probs = best.values - total
    probs = log_probs.double().exp()
    is_kept = ((probs.cumsum(dim=-1) - probs < mass) | (mass == 1)) & (log_probs > -torch.inf)
    is_kept[..., 0].fill_(True)

    ends = scores.new_full(scores.shape[:-1], -torch.inf)
    for end in end_ids:
        ends = torch.maximum(ends, scores[..., end])

    return Lattice(
        end_ids=tuple(end_ids),
        token_ids=best.indices.cpu(),
        log_probs=log_probs.masked_fill(~is_kept, -torch.inf).cpu(),
        num=is_kept.sum(dim=-1).cpu(),
        end_log_probs=(ends - total.squeeze(-1)).cpu(),
    )


@dataclass(slots=True)
class Followers:
    """How often each token followed one context, and how often any did."""

    counts: dict[int, int] = field(default_factory=dict)
    total: int = 0

    def add(self, token: int, times: int = 1) -> None:
        """Count `token` as a follower."""
        self.counts[token] = self.counts.get(token, 0) + times
        self.total += times

    def interpolated(self, token_ids: Sequence[int], shorter: list[float]) -> list[float]:
        """The probability of each token, given that after the context without its oldest token."""
        num_kinds = len(self.counts)
        count_of = self.counts.get
        weight = self.total + num_kinds
        pairs = zip(token_ids, shorter, strict=True)
        return [(count_of(token, 0) + num_kinds * prob) / weight for token, prob in pairs]


LONGEST_ORDER = 3
COUNTS_FILE = "ngram_proxy.safetensors"

Context = tuple[int, ...]


class NgramProxy:
    """Probabilities of tokens after up to two others; made by [`NgramProxy.fit`] or [`NgramProxy.load`].

    Example:

    ```python
    >>> proxy = NgramProxy.fit([[1, 2, 3, 1, 2]], order=2, vocab_size=4)
    >>> proxy.probs([2], [0, 1, 2, 3])
    [0.046875, 0.171875, 0.171875, 0.609375]

    ```
    """

    def __init__(self, order: int, vocab_size: int) -> None:
        """A proxy that has counted nothing yet."""
        self.order = order
        self.vocab_size = vocab_size
        self.counted: dict[Context, Followers] = {}

    @staticmethod
    def fit(token_sequences: Iterable[Sequence[int] | Tensor], order: int, vocab_size: int) -> "NgramProxy":
        """The model of a text; that of no text at all finds every token as likely as any other.

        Args:
            token_sequences (`Iterable`): Texts as token ids; no n-gram reaches from one into the next.
            order (`int`): Longest n-gram, from 1 to 3; the paper takes 3.
            vocab_size (`int`): Size of the target's vocabulary.

        Raises:
            [`OptionError`]: an order out of range, or a token outside of the vocabulary.
        """
        if not 1 <= order <= LONGEST_ORDER:
            raise OptionError(f"`order` must lie from 1 to {LONGEST_ORDER}, but it is {order}.")

        proxy = NgramProxy(order, vocab_size)
        for text in token_sequences:
            tokens = torch.as_tensor(text, dtype=torch.long).flatten().tolist()
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                raise OptionError(
                    f"Token ids must lie from 0 to {vocab_size - 1}, but they lie from {min(tokens)} to "
                    f"{max(tokens)}. Take the vocabulary of the tokenizer that made them."
                )

            proxy.count(tokens)

        return proxy

    @staticmethod
    def load(file: str | Path, vocab_size: int) -> "NgramProxy":
        """The model that [`NgramProxy.save`] wrote for a vocabulary of this size.

        Raises:
            [`CheckpointError`]: the file cannot be read.
        """
        with readable(Path(file).parent):
            tensors = load_file(file)

        proxy = NgramProxy(len(tensors) // 2, vocab_size)
        for length in range(1, proxy.order + 1):
            keys, counts = tensors[f"keys.{length}"].tolist(), tensors[f"counts.{length}"].tolist()
            for key, times in zip(keys, counts, strict=True):
                context, token = proxy._tokens_of(key, length)
                proxy.open(context).add(token, times)

        return proxy

    def _key_of(self, tokens: Context) -> int:
        """The whole number whose digits to the base V are these tokens."""
        key = 0
        for token in tokens:
            key = key * self.vocab_size + token

        return key

    def _tokens_of(self, key: int, length: int) -> tuple[Context, int]:
        """Context and last token of the n-gram with this number."""
        tokens = []
        for _ in range(length):
            key, token = divmod(key, self.vocab_size)
            tokens.append(token)

        return tuple(reversed(tokens[1:])), tokens[0]

    def save(self, folder: str | Path) -> None:
        """Write its counts as safetensors: of each length all n-grams, as whole numbers, and how often each came."""
        tensors = {}
        for length in range(1, self.order + 1):
            found = {}
            for context, followers in self.counted.items():
                if len(context) == length - 1:
                    for token, times in followers.counts.items():
                        found[self._key_of((*context, token))] = times

            keys = sorted(found)
            tensors[f"keys.{length}"] = torch.tensor(keys, dtype=torch.int64)
            tensors[f"counts.{length}"] = torch.tensor([found[key] for key in keys], dtype=torch.int32)

        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(tensors, Path(folder, COUNTS_FILE))
        let_others_read(folder)

    @property
    def fingerprint(self) -> str:
        """A digest of the counts, which differs between proxies of different texts."""
        found = hashlib.blake2b(f"{self.vocab_size}".encode(), digest_size=8)
        for context in sorted(self.counted):
            found.update(f"{context} {sorted(self.counted[context].counts.items())}".encode())

        return found.hexdigest()

    def probs(
        self, history: Sequence[int], token_ids: Sequence[int], known: dict[Context, list[float]] | None = None
    ) -> list[float]:
        """The probability of each of `token_ids` after a text, of whose end, `history`, up to two tokens are read.

        What was found for the same tokens before may come, by context, as `known`, where what is found is put.
        """
        known = {} if known is None else known
        context = tuple(history[max(len(history) - self.order + 1, 0) :])
        if context not in known:
            uniform = [1 / self.vocab_size] * len(token_ids)
            shorter = self.probs(context[1:], token_ids, known) if context else uniform
            followers = self.followers(context)
            known[context] = shorter if followers is None else followers.interpolated(token_ids, shorter)

        return known[context]

    def followers(self, context: Context) -> Followers | None:
        """Counts of the tokens that followed a context of at most `order - 1` tokens; None where none did."""
        return self.counted.get(context)

    def open(self, context: Context) -> Followers:
        """The same, to be counted on."""
        return self.counted.setdefault(context, Followers())

    def count(self, token_ids: Sequence[int], before: Context = ()) -> Context:
        """Count tokens that follow one another and `before`; returns what n-grams of coming tokens may begin with."""
        for token in token_ids:
            for start in range(len(before) + 1):
                self.open(before[start:]).add(token)

            newest = (*before, token)
            before = newest[max(len(newest) - self.order + 1, 0) :]

        return before


class ContextProxy(NgramProxy):
    """A proxy that goes on counting while one text is written, as if fitted to that text as well; the first one stays.

    Example:

    ```python
    >>> proxy = ContextProxy(NgramProxy.fit([], order=2, vocab_size=4))
    >>> proxy.update([1, 2, 3])
    >>> proxy.update([1, 2])
    >>> proxy.probs([2], [3])
    [0.609375]

    ```
    """

    def __init__(self, proxy: NgramProxy) -> None:
        super().__init__(proxy.order, proxy.vocab_size)
        self._shared = proxy
        self._newest: Context = ()

    def followers(self, context: Context) -> Followers | None:
        """Counts of the tokens that followed a context, this text included."""
        return self.counted.get(context) or self._shared.followers(context)

    def open(self, context: Context) -> Followers:
        """The same, to be counted on: what all texts share is copied first."""
        if context not in self.counted:
            shared = self._shared.followers(context) or Followers()
            self.counted[context] = Followers(dict(shared.counts), shared.total)

        return self.counted[context]

    def update(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the text."""
        self._newest = self.count(token_ids, self._newest)


def load_saved_proxy(name_or_path: Any, vocab_size: int, **hub: Any) -> NgramProxy | None:
    """The proxy of a saved drafter, in a folder or on the Hub; an adapter has that of the drafter it was made for."""
    base = base_of_adapter(name_or_path, **hub)
    if base is not None:
        return load_saved_proxy(base, vocab_size, **options_of_base(hub))

    file = cached_file(str(name_or_path), COUNTS_FILE, _raise_exceptions_for_missing_entries=False, **hub)
    return None if file is None else NgramProxy.load(file, vocab_size)


class PathScores:
    """Scores that each candidate of a lattice adds to a path; the proxy is read where a score is asked for.

    They end with the first position whose best candidate ends the text. Behind the end of a text a drafter fills in
    ends, and a proxy has nothing to say: a path that has ended adds the drafter's score of an end for each position,
    so that paths of any length compare.

    The drafter has `model_weight`, lambda in the paper, and the proxy the rest, which reads
    the newest two tokens of the text, `history`.
    """

    def __init__(
        self, lattice: Lattice, proxy: NgramProxy | None = None, history: Sequence[int] = (), model_weight: float = 0.5
    ) -> None:
        lattice = lattice[: lattice.length]
        if proxy is None or model_weight == 1:
            proxy, history, model_weight = None, (), 1.0

        self.context = tuple(history[-2:])
        self.end_ids = set(lattice.end_ids)
        self.token_ids: list[list[int]] = []  # candidates of each position
        self._own: list[list[float]] = []  # and the drafter's part of their scores
        self._known: list[dict[Context, list[float]]] = []  # what the proxy said of them, by context
        weighted = lattice.log_probs.double() * model_weight
        for position, num in enumerate(lattice.num.tolist()):
            self.token_ids.append(lattice.token_ids[position, :num].tolist())
            self._own.append(weighted[position, :num].tolist())
            self._known.append({})

        self.end_scores = [model_weight * value if model_weight else 0.0 for value in lattice.end_log_probs.tolist()]
        self._proxy = proxy
        self._proxy_weight = 1 - model_weight

    def after(self, offset: int, context: Context) -> list[float]:
        """The scores of the candidates at an offset after a text that ends in `context`."""
        own = self._own[offset]
        if self._proxy is None:
            return own

        weight = self._proxy_weight
        read = self._proxy.probs(context, self.token_ids[offset], self._known[offset])
        return [mine + weight * log(prob) for mine, prob in zip(own, read, strict=True)]


def search_path(scores: PathScores, beam_width: int = 3) -> list[int]:
    """The tokens of the best path that a beam finds, up to and including one that ends the text.

    ```python
    >>> import torch
    >>> from transformers_falcon_spec.drafters.diffuspec.search import prune
    >>> lattice = prune(torch.tensor([[0.1, 0.5, 0.4], [0.1, 0.5, 0.4]]).log(), mass=1)
    >>> proxy = NgramProxy.fit([[0, 1, 2, 1, 2, 1, 2]], order=2, vocab_size=3)
    >>> search_path(PathScores(lattice)), search_path(PathScores(lattice, proxy, [0]))
    ([1, 1], [1, 2])

    ```
    """
    beams: list[tuple[float, Context, bool]] = [(0.0, scores.context, False)]  # score, text, whether it has ended
    for offset, (tokens, end_score) in enumerate(zip(scores.token_ids, scores.end_scores, strict=True)):
        grown: list[tuple[float, Context, bool]] = []
        for score, text, has_ended in beams:
            if has_ended:
                grown.append((score + end_score, text, True))
                continue

            for more, token in zip(scores.after(offset, text[-2:]), tokens, strict=True):
                grown.append((score + more, (*text, token), token in scores.end_ids))

        beams = heapq.nlargest(beam_width, grown, key=itemgetter(0))

    return list(beams[0][1][len(scores.context) :])


def tree_over(scores: PathScores, root: int, num_nodes: int) -> TokenTree:
    """The tree of the `num_nodes` nodes of highest score, root included, among all paths through a lattice.

    The score of a path never rises with its length, so the best nodes of all hold their ancestors. By the drafter's
    scores alone this is [`DraftTree.best_first`] of the marginals; with a proxy the children of a node depend on the
    path to it.

    ```python
    >>> import torch
    >>> from transformers_falcon_spec.drafters.diffuspec.search import prune
    >>> lattice = prune(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4]]).log(), mass=1)
    >>> tree_over(PathScores(lattice), root=2, num_nodes=4)
    TokenTree(parents=[-1, 0, 1, 1], token_ids=[2, 0, 1, 2])

    ```
    """
    token_ids = [root]
    parents = [-1]
    arrivals = count()
    waiting: list[tuple[float, int, int, Context]] = []  # cost, arrival, parent, path; of equals the first that came

    def open_below(node: int, path: Context, cost: float) -> None:
        """Offer the children of a node, where there are positions left."""
        if len(path) < len(scores.token_ids):
            row = scores.after(len(path), (*scores.context, *path)[-2:])
            found = sorted(zip(row, scores.token_ids[len(path)], strict=True), key=itemgetter(0), reverse=True)
            for score, token in found:
                heapq.heappush(waiting, (cost - score, next(arrivals), node, (*path, token)))

    open_below(0, (), 0.0)
    while waiting and len(token_ids) < num_nodes:
        cost, _, parent, path = heapq.heappop(waiting)
        token_ids.append(path[-1])
        parents.append(parent)
        if path[-1] not in scores.end_ids:
            open_below(len(token_ids) - 1, path, cost)

    return TokenTree(parents, token_ids)
