"""Naive twins of the lattice, the proxy and the searches: everything is enumerated, in lists and from the start each time."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

Path = tuple[int, ...]
# Log-probability of a token after a path, by the path so far.
Score = Callable[[Path, int], float]


def smallest_set(probs: Sequence[float], tau: float, max_candidates: int) -> set[int]:
    """The fewest tokens with mass `tau`, by trying all sets; the likeliest `max_candidates` where no set of so many has it."""
    for size in range(1, max_candidates + 1):
        sets = list(itertools.combinations(range(len(probs)), size))
        best = max(sets, key=lambda tokens: sum(probs[token] for token in tokens))
        if sum(probs[token] for token in best) >= tau:
            return set(best)
    return set(best)


class WittenBell:
    """The proxy as its formula stands, every count taken anew from the texts."""

    def __init__(self, texts: Sequence[Sequence[int]], order: int, vocab_size: int) -> None:
        self.texts, self.order, self.vocab_size = texts, order, vocab_size

    def prob(self, history: Sequence[int], token: int) -> float:
        """The probability of `token` after the newest `order - 1` tokens of `history`."""
        return self._prob(tuple(history[max(len(history) - self.order + 1, 0) :]) if self.order > 1 else (), token)

    def _prob(self, history: Path, token: int) -> float:
        shorter = self._prob(history[1:], token) if history else 1 / self.vocab_size
        size = len(history) + 1
        ngrams = [tuple(text[i : i + size]) for text in self.texts for i in range(len(text) - size + 1)]
        followers = [ngram[-1] for ngram in ngrams if ngram[:-1] == history]
        if not followers:
            return shorter
        num_kinds = len(set(followers))
        return (followers.count(token) + num_kinds * shorter) / (len(followers) + num_kinds)


class NaiveLattice:
    """A lattice as lists of tokens, with a score for each token after each path."""

    def __init__(self, candidates: Sequence[Sequence[int]], score: Score, end_scores: Sequence[float], ends: set[int]):
        self.score, self.ends = score, ends
        raw_ends = [offset for offset, tokens in enumerate(candidates) if tokens[0] in ends]
        self.length = raw_ends[0] + 1 if raw_ends else len(candidates)
        self.candidates, self.end_scores = candidates[: self.length], end_scores

    def total(self, path: Path, length: int) -> float:
        """The score of a path, filled up to `length` if it has ended."""
        own = sum(self.score(path[:offset], token) for offset, token in enumerate(path))
        return own + sum(self.end_scores[offset] for offset in range(len(path), length))

    def extensions(self, path: Path, offset: int) -> list[Path]:
        """A path with each candidate of a position behind it; itself if it has ended."""
        if path and path[-1] in self.ends:
            return [path]
        return [(*path, token) for token in self.candidates[offset]]

    def beam(self, width: int) -> Path:
        """The best path that a beam of this width finds."""
        paths: list[Path] = [()]
        for offset in range(self.length):
            grown = [longer for path in paths for longer in self.extensions(path, offset)]
            paths = sorted(grown, key=lambda path: -self.total(path, offset + 1))[:width]
        return paths[0]

    def best(self) -> Path:
        """The best of all paths."""
        return max(self.all_paths(), key=lambda path: self.total(path, self.length))

    def all_paths(self) -> list[Path]:
        """Every path that has ended or reaches the last position."""
        paths: list[Path] = [()]
        for offset in range(self.length):
            paths = [longer for path in paths for longer in self.extensions(path, offset)]
        return paths

    def best_nodes(self, num_nodes: int) -> list[Path]:
        """The `num_nodes` paths of highest score of all beginnings of paths, the empty one included, best first."""
        nodes = {path[:size] for path in self.all_paths() for size in range(len(path) + 1)}
        return sorted(nodes, key=lambda path: -self.total(path, len(path)))[:num_nodes]


def mixed(log_probs: Sequence[dict[int, float]], proxy: WittenBell | None, history: Path, weight: float) -> Score:
    """The mixed score of a token after a path: the drafter's `log_probs` of each position and the proxy's."""

    def score(path: Path, token: int) -> float:
        own = log_probs[len(path)][token]
        if proxy is None:
            return own
        return weight * own + (1 - weight) * math.log(proxy.prob((*history, *path), token))

    return score


def best_of_each(lattice: Any) -> list[int]:
    """The best token of each position of a `Lattice`, up to one that ends the text."""
    return [int(token) for token in lattice.token_ids[: lattice.length, 0]]
