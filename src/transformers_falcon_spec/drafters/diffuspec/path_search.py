"""What to draft from a lattice: the path that reads best, the best or drawn token of each place, or the likeliest tree.

The places of a lattice do not know one another's tokens, so the best ones need not follow from one another. Causal-consistency path
search weighs them with a model that reads from left to right: `model_weight * log p(drafter) + (1 - model_weight) * log p(proxy)`,
summed over a path, by a beam. Source: arXiv 2510.02358, section 3.2.

A path or tree found here is no draw: it follows from the lattice alone. Where drafts are judged by what they were drawn from, only
[`draw_marginals`] may be used, for handing over the marginals of a searched path would bias the text.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter

import torch
from torch import Tensor

from ...errors import OptionError
from ...generation.candidates import DraftBudget
from ..static_tree import draw_children
from .lattice import Lattice, allowed_logits
from .proxy import NgramProxy


@dataclass(frozen=True)
class PathScores:
    """What each candidate of a lattice of one row adds to the score of a path; lists that are alike are kept once.

    Args:
        rows (`torch.Tensor` of shape `(rows, candidates)`): Scores of all candidates of one place after one history; -inf where pruned.
        index (`torch.Tensor` of shape `(places, candidates, candidates)`):
            The row for a place after candidate `a` two places and candidate `b` one place before; 0 where those are the text.
        end_scores (`torch.Tensor` of shape `(places,)`): What a place adds to a path that has ended before it.
    """

    rows: Tensor
    index: Tensor
    end_scores: Tensor


def mixed_scores(
    lattice: Lattice, proxy: NgramProxy | None = None, history: Sequence[int] = (), model_weight: float = 0.5
) -> PathScores:
    """Scores of the drafter and of a proxy, mixed.

    They end with the first place whose best candidate ends the text. Behind the end of a text a drafter fills in ends, and a proxy
    has nothing to say: a path that has ended adds the drafter's score of an end for each place, so that paths of any length compare.

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
    length = int(lattice.lengths[0])
    num = lattice.num[0, :length]
    width = int(num.max())
    log_probs, token_ids = lattice.log_probs[0, :length, :width].double(), lattice.token_ids[0, :length, :width]
    ends = lattice.end_log_probs[0, :length].double()
    if proxy is None or model_weight == 1:
        places = torch.arange(length)
        return PathScores(log_probs, places[:, None, None].expand(-1, width, width), ends)
    read = proxy.over_lattice(token_ids, num, history)
    own = log_probs[read.places]
    mixed = (own.nan_to_num(neginf=0.0) * model_weight + (1 - model_weight) * read.rows).where(own > -torch.inf, own)
    return PathScores(mixed, read.index, ends * model_weight if model_weight else torch.zeros_like(ends))


def search_path(lattice: Lattice, scores: PathScores, beam_width: int = 3) -> Tensor:
    """The tokens `[length]` of the best path found by a beam from left to right, up to and including one that ends the text.

    Args:
        lattice (`Lattice`): Of one row, on the CPU.
        scores (`PathScores`): Of that lattice.
        beam_width (`int`): Paths kept at each place, 1 for the best next token each time; the paper finds 3 or 4 best.

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
    tokens, num, ends = lattice.token_ids[0].tolist(), lattice.num[0].tolist(), set(lattice.end_ids)
    rows, index, end_scores = scores.rows.tolist(), scores.index.tolist(), scores.end_scores.tolist()
    beams = [_Beam(0.0, ())]
    for place, end_score in enumerate(end_scores):
        grown: list[tuple[float, _Beam, int]] = []  # with the rank of the next token; -1 where there is none
        for beam in beams:
            if beam.has_ended:
                grown.append((beam.score + end_score, beam, -1))
                continue
            row = rows[index[place][beam.two_before][beam.before]]
            grown += [(beam.score + row[rank], beam, rank) for rank in range(num[place])]
        best = heapq.nlargest(beam_width, grown, key=itemgetter(0))
        beams = [beam.grown(score, rank, tokens[place], ends) for score, beam, rank in best]
    return torch.tensor(beams[0].tokens)


def argmax_path(lattice: Lattice) -> Tensor:
    """The best token of each place `[length]` of a lattice of one row, up to and including one that ends the text."""
    return lattice.token_ids[0, : int(lattice.lengths[0]), 0]


def draw_marginals(
    logits: Tensor, budget: DraftBudget, rng: torch.Generator, forbidden_ids: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """A token of each place, drawn without regard to the others, and exactly what it was drawn from.

    Args:
        logits (`torch.Tensor` of shape `(rows, places, vocab)`): Of the denoising pass, over the target's vocabulary.
        budget (`DraftBudget`): Whose `temperature` to draw at; its `noise`, where there is some, decides in place of `rng`.
        rng (`torch.Generator`): What to draw from.
        forbidden_ids (`Sequence[int]`): Tokens that must not be drafted; their probability is 0.

    Returns:
        Tokens `(rows, places)` and probabilities `(rows, places, vocab)`; those of a place are what the node before it was given.
    """
    probs = torch.softmax(allowed_logits(logits, forbidden_ids) / (budget.temperature or 1.0), dim=-1)
    depths = list(range(1, probs.shape[1] + 1))
    return draw_children(probs, depths, 1, budget, rng)[..., 0], probs


@dataclass(frozen=True)
class LatticeTree:
    """A tree of one row, in the order in which its nodes were taken: best first, node 0 the root.

    Args:
        token_ids (`torch.Tensor` of shape `(nodes,)`): The token at each node.
        parents (`torch.Tensor` of shape `(nodes,)`): The node above each one, -1 at the root.
        scores (`torch.Tensor` of shape `(nodes,)`): The score of the path to each node, 0 at the root; falls from node to node.
    """

    token_ids: Tensor
    parents: Tensor
    scores: Tensor


def tree_over(lattice: Lattice, scores: PathScores, root: int, num_nodes: int) -> LatticeTree:
    """The `num_nodes` nodes of highest score, root included, of the tree of all paths through a lattice; fewer if there are fewer.

    The score of a path never rises with its length, so the best nodes of all hold their ancestors. By the drafter's scores alone
    this is [`DraftTree.best_first`] of the marginals; with a proxy the children of a node depend on the path to it.

    Args:
        lattice (`Lattice`): Of one row, on the CPU.
        scores (`PathScores`): Of that lattice.
        root (`int`): The newest token of the text.
        num_nodes (`int`): Most nodes, root included.

    Raises:
        [`OptionError`]: there is no room for the root.

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
    ordered = scores.rows.sort(dim=-1, descending=True, stable=True)
    values, ranks, index = ordered.values.tolist(), ordered.indices.tolist(), scores.index.tolist()
    tokens, ends, numbers = lattice.token_ids[0].tolist(), set(lattice.end_ids), count()
    found: list[tuple[int, int, float]] = [(root, -1, 0.0)]  # token, parent, score
    waiting: list[
        tuple[float, int, _Place, int]
    ] = []  # what costs least comes out first, of equals what came in first

    def offer(place: _Place, order: int) -> None:
        """The child of `place` that is best after `order` others."""
        if place.depth < len(index):
            row = values[index[place.depth][place.two_before][place.before]]
            if order < len(row) and row[order] > -torch.inf:
                heapq.heappush(waiting, (-(place.score + row[order]), next(numbers), place, order))

    offer(_Place(0, 0, 0, 0, 0.0), 0)
    while waiting and len(found) < num_nodes:
        cost, _, place, order = heapq.heappop(waiting)
        rank = ranks[index[place.depth][place.two_before][place.before]][order]
        token = tokens[place.depth][rank]
        offer(place, order + 1)
        if token not in ends:
            offer(_Place(len(found), place.depth + 1, place.before, rank, -cost), 0)
        found.append((token, place.node, -cost))
    token_ids, parents, totals = zip(*found, strict=True)
    return LatticeTree(torch.tensor(token_ids), torch.tensor(parents), torch.tensor(totals))


@dataclass(frozen=True)
class _Beam:
    """A path on the way, and the ranks of its newest two candidates."""

    score: float
    tokens: tuple[int, ...]
    two_before: int = 0
    before: int = 0
    has_ended: bool = False

    def grown(self, score: float, rank: int, tokens: list[int], ends: set[int]) -> "_Beam":
        """The path with the candidate of this rank behind it; the same path, with another score, where there is none."""
        if rank < 0:
            return _Beam(score, self.tokens, has_ended=True)
        return _Beam(score, (*self.tokens, tokens[rank]), self.before, rank, tokens[rank] in ends)


@dataclass(frozen=True)
class _Place:
    """A node of a tree that may have children, and the ranks of the newest two candidates on the path to it."""

    node: int
    depth: int
    two_before: int
    before: int
    score: float
