"""The search over a lattice of candidates: it finds the best path or the likeliest tree.

The positions of a lattice do not know one another's tokens, so the best ones need not follow from one another.
Causal-consistency path search weighs them with a model that reads from left to right: `model_weight * log p(drafter) +
(1 - model_weight) * log p(proxy)`, summed over a path, by a beam. Source: arXiv 2510.02358, section 3.2.

A path or tree found here is no draw: it follows from the lattice alone. No verifier is told that it was drawn from
something, for handing over the marginals of a searched path would bias the text.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import log
from operator import itemgetter

from .lattice import Lattice
from .proxy import Context, NgramProxy


class PathScores:
    """Scores that each candidate of a lattice adds to a path; the proxy is read where a score is asked for.

    They end with the first position whose best candidate ends the text. Behind the end of a text a drafter fills in
    ends, and a proxy has nothing to say: a path that has ended adds the drafter's score of an end for each position,
    so that paths of any length compare.

    The lattice is on the CPU. The drafter has `model_weight`, lambda in the paper, and the proxy the rest, which reads
    the newest two tokens of the text, `history`.
    """

    def __init__(
        self, lattice: Lattice, proxy: NgramProxy | None = None, history: Sequence[int] = (), model_weight: float = 0.5
    ) -> None:
        lattice = lattice.first(lattice.length)
        if proxy is None or model_weight == 1:
            proxy, history, model_weight = None, (), 1.0
        self.context, self.end_ids = tuple(history[-2:]), set(lattice.end_ids)
        nums = lattice.num.tolist()
        self.token_ids = [row[:num] for row, num in zip(lattice.token_ids.tolist(), nums, strict=True)]
        own = [row[:num] for row, num in zip(lattice.log_probs.tolist(), nums, strict=True)]
        self._own = [[model_weight * value for value in row] for row in own]
        self.end_scores = [model_weight * value if model_weight else 0.0 for value in lattice.end_log_probs.tolist()]
        self._proxy, self._proxy_weight = proxy, 1 - model_weight
        self._known: list[dict[Context, list[float]]] = [{} for _ in nums]

    def after(self, offset: int, context: Context) -> list[float]:
        """The scores of the candidates at an offset after a text that ends in `context`."""
        own, weight = self._own[offset], self._proxy_weight
        if self._proxy is None:
            return own
        read = self._proxy.probs(context, self.token_ids[offset], self._known[offset])
        return [mine + weight * log(prob) for mine, prob in zip(own, read, strict=True)]


def search_path(scores: PathScores, beam_width: int = 3) -> list[int]:
    """The tokens of the best path that a beam finds, up to and including one that ends the text.

    ```python
    >>> import torch
    >>> from transformers_falcon_spec.drafters.diffuspec.lattice import prune
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
            row = scores.after(offset, text[-2:])
            grown += [
                (score + more, (*text, token), token in scores.end_ids)
                for more, token in zip(row, tokens, strict=True)
            ]
        beams = heapq.nlargest(beam_width, grown, key=itemgetter(0))
    return list(beams[0][1][len(scores.context) :])


@dataclass(frozen=True)
class LatticeTree:
    """A tree of one row, its nodes best first; node 0 is the root, whose parent is -1."""

    token_ids: list[int]
    parents: list[int]

    @classmethod
    def path(cls, root: int, tokens: Sequence[int] = ()) -> "LatticeTree":
        """A draft whose tokens follow one another."""
        return cls([root, *tokens], list(range(-1, len(tokens))))

    @property
    def depths(self) -> list[int]:
        """The depth of each node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths


def tree_over(scores: PathScores, root: int, num_nodes: int) -> LatticeTree:
    """The tree of the `num_nodes` nodes of highest score, root included, among all paths through a lattice.

    The score of a path never rises with its length, so the best nodes of all hold their ancestors. By the drafter's
    scores alone this is [`DraftTree.best_first`] of the marginals; with a proxy the children of a node depend on the
    path to it.

    ```python
    >>> import torch
    >>> from transformers_falcon_spec.drafters.diffuspec.lattice import prune
    >>> lattice = prune(torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4]]).log(), mass=1)
    >>> tree_over(PathScores(lattice), root=2, num_nodes=4)
    LatticeTree(token_ids=[2, 0, 1, 2], parents=[-1, 0, 1, 1])

    ```
    """
    token_ids, parents, arrivals = [root], [-1], count()
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
    return LatticeTree(token_ids, parents)
