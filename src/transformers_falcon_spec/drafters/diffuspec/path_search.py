"""The search over a lattice of candidates: it finds the best path, the likeliest tree, or draws each position alone.

The positions of a lattice do not know one another's tokens, so the best ones need not follow from one another.
Causal-consistency path search weighs them with a model that reads from left to right: `model_weight * log p(drafter) +
(1 - model_weight) * log p(proxy)`, summed over a path, by a beam. Source: arXiv 2510.02358, section 3.2.

A path or tree found here is no draw: it follows from the lattice alone. Where drafts are judged by what they were
drawn from, only [`draw_marginals`] may be used, for handing over the marginals of a searched path would bias the text.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import log
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import OptionError
from ...generation.drafting import DraftBudget
from ..tree_drafting.static import draw_children
from .lattice import Lattice
from .proxy import Context, NgramProxy


class PathScores:
    """Scores that each candidate of a one-row lattice adds to a path; the proxy is read where a score is asked for.

    Args:
        token_ids (`list[list[int]]`): The candidates of each position, as far as drafts reach.
        log_probs (`list[list[float]]`): What the drafter gives them.
        end_log_probs (`list[float]`): What the drafter gives an end of the text at each position.
        proxy (`NgramProxy`, *optional*): Without one the drafter's scores stand alone.
        context (`tuple[int, ...]`): The newest tokens of the text.
        model_weight (`float`): Weight of the drafter; the proxy has the rest.
    """

    def __init__(
        self,
        token_ids: list[list[int]],
        log_probs: list[list[float]],
        end_log_probs: list[float],
        proxy: NgramProxy | None,
        context: Context,
        model_weight: float,
    ) -> None:
        self.token_ids, self.context = token_ids, context
        self.end_scores = [model_weight * value if model_weight else 0.0 for value in end_log_probs]
        self._own = [[model_weight * value for value in row] for row in log_probs]
        self._proxy, self._proxy_weight = proxy, 1 - model_weight
        self._read: list[dict[Context, list[float]]] = [{} for _ in token_ids]

    def after(self, position: int, context: Context) -> list[float]:
        """The scores of a position's candidates after a text that ends in `context`."""
        own, weight = self._own[position], self._proxy_weight
        if self._proxy is None:
            return own
        read = self._proxy.probs(context, self.token_ids[position], self._read[position])
        return [mine + weight * log(prob) for mine, prob in zip(own, read, strict=True)]


def mixed_scores(
    lattice: Lattice, proxy: NgramProxy | None = None, history: Sequence[int] = (), model_weight: float = 0.5
) -> PathScores:
    """Scores of the drafter and of a proxy, mixed.

    They end with the first position whose best candidate ends the text. Behind the end of a text a drafter fills in
    ends, and a proxy has nothing to say: a path that has ended adds the drafter's score of an end for each position,
    so that paths of any length compare.

    Args:
        lattice (`Lattice`): Of one row, on the CPU.
        proxy (`NgramProxy`, *optional*): Reads from left to right; without one the drafter's scores stand alone.
        history (`Sequence[int]`): The newest tokens of the text; the proxy reads two.
        model_weight (`float`): Weight of the drafter, from 0 to 1; lambda in the paper.

    Raises:
        [`OptionError`]: the weight is no share.
    """
    if not 0 <= model_weight <= 1:
        raise OptionError(f"`model_weight` must lie from 0 to 1, but it is {model_weight}.")
    nums = lattice.num[0, : int(lattice.lengths[0])].tolist()
    token_ids, log_probs = (
        [row[:num] for row, num in zip(values[0].tolist(), nums, strict=False)]
        for values in (lattice.token_ids, lattice.log_probs)
    )
    ends = lattice.end_log_probs[0, : len(nums)].tolist()
    if proxy is None or model_weight == 1:
        return PathScores(token_ids, log_probs, ends, None, (), 1.0)
    return PathScores(token_ids, log_probs, ends, proxy, tuple(history[-2:]), model_weight)


def search_path(lattice: Lattice, scores: PathScores, beam_width: int = 3) -> Tensor:
    """The tokens `[length]` of the best path that a beam finds, up to and including one that ends the text.

    Raises:
        [`OptionError`]: the width is below 1.

    Example:

    ```python
    >>> from transformers_falcon_spec.drafters.diffuspec.lattice import prune
    >>> lattice = prune(torch.tensor([[[0.1, 0.5, 0.4], [0.1, 0.5, 0.4]]]).log(), tau=1)
    >>> proxy = NgramProxy.fit([[0, 1, 2, 1, 2, 1, 2]], order=2, vocab_size=3)
    >>> argmax_path(lattice).tolist(), search_path(lattice, mixed_scores(lattice, proxy, [0])).tolist()
    ([1, 1], [1, 2])

    ```
    """
    if beam_width < 1:
        raise OptionError(f"`beam_width` must be at least 1, but it is {beam_width}.")
    ends = set(lattice.end_ids)
    beams = [_Beam(0.0, (), scores.context, has_ended=False)]
    for position, (tokens, end_score) in enumerate(zip(scores.token_ids, scores.end_scores, strict=True)):
        grown: list[tuple[float, _Beam, int | None]] = []  # with the next token; None where there is none
        for beam in beams:
            if beam.has_ended:
                grown.append((beam.score + end_score, beam, None))
                continue
            row = scores.after(position, beam.context)
            grown += [(beam.score + score, beam, token) for score, token in zip(row, tokens, strict=True)]
        grown.sort(key=itemgetter(0), reverse=True)
        beams = [beam.grown(score, token, ends) for score, beam, token in grown[:beam_width]]
    return torch.tensor(beams[0].tokens)


def argmax_path(lattice: Lattice) -> Tensor:
    """The best token `[length]` of each position of a lattice of one row, up to one that ends the text."""
    return lattice.token_ids[0, : int(lattice.lengths[0]), 0]


def draw_marginals(logits: Tensor, budget: DraftBudget, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """A token of each position, drawn without regard to the others, and exactly what it was drawn from.

    Args:
        logits (`torch.Tensor` of shape `(rows, positions, vocab)`): Of the denoising pass, over the target's
            vocabulary.
        budget (`DraftBudget`): Whose `temperature` to draw at; its `noise`, where there is some, decides instead of
            `rng`.
        rng (`torch.Generator`): What to draw from.

    Returns:
        Tokens `(rows, positions)` and probabilities `(rows, positions, vocab)`; those of a position are what the node
        before it was given.
    """
    probs = torch.softmax(logits.float() / (budget.temperature or 1.0), dim=-1)
    depths = list(range(1, probs.shape[1] + 1))
    return draw_children(probs, depths, 1, budget, rng)[..., 0], probs


@dataclass(frozen=True)
class LatticeTree:
    """A tree of one row, in the order in which its nodes were taken: best first, node 0 the root.

    Args:
        token_ids (`torch.Tensor` of shape `(nodes,)`): The token at each node.
        parents (`torch.Tensor` of shape `(nodes,)`): The node above each one, -1 at the root.
        scores (`torch.Tensor` of shape `(nodes,)`, *optional*):
            The score of the path to each node, 0 at the root; falls from node to node.
    """

    token_ids: Tensor
    parents: Tensor
    scores: Tensor | None = None

    @classmethod
    def path(cls, root: int, tokens: Tensor | None = None) -> "LatticeTree":
        """A draft whose tokens follow one another."""
        token_ids = torch.tensor([root, *([] if tokens is None else tokens.tolist())])
        return cls(token_ids, torch.arange(-1, len(token_ids) - 1))


def tree_over(lattice: Lattice, scores: PathScores, root: int, num_nodes: int) -> LatticeTree:
    """The tree of the `num_nodes` nodes of highest score, root included, among all paths through a lattice.

    The score of a path never rises with its length, so the best nodes of all hold their ancestors. By the drafter's
    scores alone this is [`DraftTree.best_first`] of the marginals; with a proxy the children of a node depend on the
    path to it.

    Raises:
        [`OptionError`]: `num_nodes` leaves out the root.

    Example:

    ```python
    >>> from transformers_falcon_spec.drafters.diffuspec.lattice import prune
    >>> lattice = prune(torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.5, 0.4]]]).log(), tau=1)
    >>> tree = tree_over(lattice, mixed_scores(lattice), root=2, num_nodes=4)
    >>> tree.token_ids.tolist(), tree.parents.tolist()
    ([2, 0, 1, 2], [-1, 0, 1, 1])

    ```
    """
    if num_nodes < 1:
        raise OptionError(f"`num_nodes` must be at least 1, for the root, but it is {num_nodes}.")
    ends, numbers = set(lattice.end_ids), count()
    found: list[tuple[int, int, float]] = [(root, -1, 0.0)]  # token, parent, score
    waiting: list[
        tuple[float, int, int, _Siblings]
    ] = []  # the best comes out first, of equals the one that came in first

    def offer(siblings: _Siblings, order: int) -> None:
        if order < len(siblings.scores):
            heapq.heappush(waiting, (-siblings.scores[order], next(numbers), order, siblings))

    def open_below(node: int, position: int, context: Context) -> None:
        """The children of a node, where there are positions left."""
        if position < len(scores.token_ids):
            row, above = scores.after(position, context), found[node][2]
            ranks = sorted(range(len(row)), key=row.__getitem__, reverse=True)
            tokens = [scores.token_ids[position][rank] for rank in ranks]
            offer(_Siblings(node, position, context, tokens, [above + row[rank] for rank in ranks]), 0)

    open_below(0, 0, scores.context)
    while waiting and len(found) < num_nodes:
        cost, _, order, siblings = heapq.heappop(waiting)
        token = siblings.tokens[order]
        found.append((token, siblings.parent, -cost))
        offer(siblings, order + 1)
        if token not in ends:
            open_below(len(found) - 1, siblings.position + 1, (*siblings.context[-1:], token))
    token_ids, parents, totals = zip(*found, strict=True)
    return LatticeTree(torch.tensor(token_ids), torch.tensor(parents), torch.tensor(totals, dtype=torch.float))


class _Beam(NamedTuple):
    """A path on the way, and the newest two tokens of the text with it."""

    score: float
    tokens: tuple[int, ...]
    context: Context
    has_ended: bool

    def grown(self, score: float, token: int | None, ends: set[int]) -> "_Beam":
        """The path with a token behind it, or the same path with another score."""
        if token is None:
            return self._replace(score=score)
        return _Beam(score, (*self.tokens, token), (*self.context[-1:], token), token in ends)


class _Siblings(NamedTuple):
    """The children of one node, best first."""

    parent: int
    position: int
    context: Context
    tokens: list[int]
    scores: list[float]
