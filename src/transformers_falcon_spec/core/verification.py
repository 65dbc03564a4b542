"""Which nodes of a draft become text: token matching, and rules for drafts that were drawn.

Rules for drawn drafts keep the target's distribution exactly. The children of a node are ordered: each was drawn from
what its earlier siblings left of the node's draft distribution. Draws with replacement whose duplicates were dropped
are of that form as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from ..errors import DraftTreeError
from .sampling import Draws

TargetProbs = Callable[[int], Float[Tensor, " vocab"]]


@dataclass(frozen=True)
class AcceptedPath:
    """The nodes of a row's tree that are accepted in one step, and the tokens that become text."""

    path: tuple[int, ...] = ()  # accepted nodes, the root first; empty for a row that takes no step
    token_ids: tuple[int, ...] = ()  # one new token after each node of the path; the last one is the bonus token

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens, without root and bonus token."""
        return len(self.path) - 1

    def cut(self, num_tokens: int) -> "AcceptedPath":
        """The first `num_tokens` nodes and tokens."""
        return AcceptedPath(self.path[:num_tokens], self.token_ids[:num_tokens])

    def __add__(self, other: "AcceptedPath") -> "AcceptedPath":
        """This path, continued by another one of the same row."""
        return AcceptedPath(self.path + other.path, self.token_ids + other.token_ids)


@dataclass(frozen=True)
class TokenTree:
    """The draft of one row as plain lists."""

    parents: Sequence[int]  # -1 at the root and at nodes that must not become text; else a node before the child
    token_ids: Sequence[int]  # siblings differ

    @property
    def is_root_alone(self) -> bool:
        """Whether nothing was drafted."""
        return max(self.parents) < 0

    @cached_property
    def depths(self) -> list[int]:
        """The distance of each node from the root; 0 at nodes that must not become text."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)

        return depths

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`; None if there is none."""
        for child, parent in enumerate(self.parents):
            if parent == node and self.token_ids[child] == token:
                return child
        return None

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes from the root to `node`."""
        path = [node]
        while path[-1] > 0:
            path.append(self.parents[path[-1]])

        return tuple(reversed(path))


def match_tokens(
    tree: TokenTree, target_token: Callable[[int], int], start: int = 0, max_tokens: int | None = None
) -> AcceptedPath:
    """Follow the target through the tree: take its token after a node, go to the child that holds it, and repeat.

    The target is asked about nodes of the path only, in their order. So its answers can be those of decoding without a
    drafter, draw by draw, and then the text is the same for the same seed, whatever the tree. The way begins at node
    `start` and ends after `max_tokens` tokens, the bonus token included: n drafted tokens are n + 1.

    Example:

    The target wants 7 after the root and 9 after the 7, so the path 0 -> 1 -> 3 is accepted:

    ```python
    >>> target_tokens = [7, 9, 1, 4]
    >>> match_tokens(TokenTree([-1, 0, 0, 1], [5, 7, 8, 9]), target_tokens.__getitem__)
    AcceptedPath(path=(0, 1, 3), token_ids=(7, 9, 4))

    ```
    """
    path = [start]
    token_ids = [target_token(start)]

    while len(token_ids) != max_tokens:
        child = tree.child(path[-1], token_ids[-1])
        if child is None:
            break

        path.append(child)
        token_ids.append(target_token(child))

    return AcceptedPath(tuple(path), tuple(token_ids))


@dataclass(frozen=True)
class DrawnTree(TokenTree):
    """A tree whose tokens were drawn; where too few tokens have probability, the last siblings are never accepted."""

    draft_probs: Float[Tensor, "dists vocab"]  # the distributions that were drawn from
    dist_index: Sequence[int]  # for each node the distribution of its first child; not read at leaves

    def children(self, node: int) -> list[int]:
        """The children of `node` in the order of their draws."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


class _NodeState:
    """The state at one node: how likely it is to be accepted, and what is left of both distributions after it."""

    def __init__(self, tree: DrawnTree, node: int, weight: float, target: Tensor) -> None:
        self.tree = tree
        self.node = node
        self.weight = weight
        self.target = target.double() / target.double().sum()  # sums of float64 hardly round
        self.untried = tree.children(node)
        if self.untried:
            self._leave(tree.draft_probs[tree.dist_index[node]].double())

    def weight_of(self, child: int) -> float:
        """The probability of accepting `child`, given that this node is accepted."""
        token = self.tree.token_ids[child]
        if self.draft[token] <= 0:
            raise DraftTreeError(
                f"Every token must have a probability in the distribution it was drawn from, but token {token} of "
                f"node {child} has none while others have. `draft_probs` must be what was drawn from, after all "
                "processors."
            )

        return min(1.0, self.weight * float(self.target[token] / self.draft[token]))

    def reject(self, child: int) -> None:
        """Take `child` out: of the target stays what the draft had not covered, of the draft its other tokens."""
        left = (self.weight * self.target - self.draft).clamp(min=0)
        mass = float(left.sum())
        if mass > 0:
            self.target = left / mass
            self.weight = mass / (mass + (1 - self.weight))  # in this order: a mass too small to change 1 still counts
        else:
            self.weight = 0.0  # nothing of the target is left here; the node itself will be rejected

        self.untried.remove(child)
        others = self.draft.clone()
        others[self.tree.token_ids[child]] = 0
        self._leave(others)

    def _leave(self, draft: Tensor) -> None:
        """The next child was drawn from these probabilities, which need not sum to 1; from nothing none was drawn."""
        self.draft = draft / draft.sum()
        if not draft.any():
            self.untried = []

    def happens(self, prob: float, draws: Draws) -> bool:
        """Draw whether something of this probability happens; nothing is drawn if that is certain."""
        if prob >= 1 or prob <= 0:
            return prob >= 1

        return int(draws.categorical(self.target.new_tensor([[prob, 1 - prob]]))) == 0

    def end(self, draws: Draws) -> AcceptedPath:
        """Keep the path to here and draw the token after it from what is left of the target."""
        path = self.tree.path_to(self.node)
        bonus_token = int(draws.categorical(self.target[None]))
        return AcceptedPath(path, (*(self.tree.token_ids[node] for node in path[1:]), bonus_token))


def recursive_rejection(tree: DrawnTree, target_probs: TargetProbs, draws: Draws) -> AcceptedPath:
    """From the root down: try the children of a node in turn, and go on below the first that is accepted.

    On a chain this is the rule of speculative sampling. Source: arXiv 2211.17192, algorithm 1 (chain); arXiv
    2305.09781 (tree); arXiv 2402.12374 (children without replacement).
    """
    state = _NodeState(tree, 0, 1.0, target_probs(0))
    while state.untried:
        child = state.untried[0]
        if state.happens(state.weight_of(child), draws):
            state = _NodeState(tree, child, 1.0, target_probs(child))
        else:
            state.reject(child)

    return state.end(draws)


def traversal_verification(tree: DrawnTree, target_probs: TargetProbs, draws: Draws) -> AcceptedPath:
    """From the leaves up: keep a whole path or take its last node out, first leaf first.

    On a chain this is block verification. `target_probs` is asked for nodes that may not be kept, so processors must
    not remember calls. Source: arXiv 2505.12398, algorithm 1; arXiv 2403.10444, algorithm 2 (chain).
    """
    path = [_NodeState(tree, 0, 1.0, target_probs(0))]
    while True:
        state = path[-1]
        if state.untried:
            child = state.untried[0]
            path.append(_NodeState(tree, child, state.weight_of(child), target_probs(child)))
        elif len(path) == 1 or state.happens(state.weight, draws):
            return state.end(draws)
        else:
            path.pop()
            path[-1].reject(state.node)
