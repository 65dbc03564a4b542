"""The rules that decide which part of a draft becomes text: a `Verifier` object for each, registered by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..core.rejection import DrawnTree, recursive_rejection, traversal_verification
from ..core.verification import AcceptedPath, TokenTree, match_tokens
from ..errors import GenerationError, OptionError
from .drafting import Draft
from .sequence_state import NodeScores


@dataclass(frozen=True)
class Verifier:
    """One rule of verification, as a function and flags. Leave every flag out unless you are sure: nothing checks it.

    The function is given the [`NodeScores`] of one row and returns an [`AcceptedPath`]. It may use four things:
    `scores.tree`, the draft; `scores.token_after(node)`, the target's own next token; `scores.probs_after(node)`, the
    target's distribution; and `scores.draws`, the only source of randomness. When sampling, each call of `token_after`
    draws: make it once for a node, the root first, and for accepted nodes only. Change nothing else.

    Not every step asks the rule: greedy calls match tokens whatever the rule, and steps in which nothing was drafted
    take the target's token. A path that is not one of the tree, or lacks the bonus token, is a [`GenerationError`].

    Args:
        name (`str`): The name by which `SpeculationConfig(verifier=...)` asks for it.
        accept (`Callable`): The rule.
        needs_draft_probs (`bool`): It verifies tokens that were drawn, and needs the distributions drawn from.
        allows_grown_trees (`bool`): The shape of a tree may depend on the drafter's probabilities.
        asks_in_order (`bool`): It asks for scores of accepted nodes only, once each and in their order. This is needed
            by processors that remember their calls (guidance, SynthID); without it such calls are refused.
        keeps_seeded_text (`bool`): With a seed it writes the text that the target alone writes with that seed, as do
            rules that draw through `token_after` alone. What is drafted then changes no text, so the tuner chooses it.
        couples_draws (`bool`): Draws come from a stream that drafters can foresee.

    Example:

    ```python
    >>> from types import SimpleNamespace
    >>> def one_drafted_token(scores):
    ...     return match_tokens(scores.tree, scores.token_after, max_tokens=2)
    >>> rule = Verifier("one_drafted_token", one_drafted_token)

    The draft is the chain 7, 9 after the text's newest token 5, and the target's own tokens are 7, 9, 4. The rule
    accepts node 1, which holds the 7, and adds the 9 as the bonus token:

    >>> draft = TokenTree([-1, 0, 1], [5, 7, 9])
    >>> rule.accept(SimpleNamespace(tree=draft, token_after=[7, 9, 4].__getitem__))
    AcceptedPath(path=(0, 1), token_ids=(7, 9))

    ```
    """

    name: str
    accept: Callable[[NodeScores], AcceptedPath]
    needs_draft_probs: bool = False
    allows_grown_trees: bool = True
    asks_in_order: bool = False
    keeps_seeded_text: bool = False
    couples_draws: bool = False

    @property
    def is_token_matching(self) -> bool:
        """Whether the rule is token matching to its end, so that a row can be written token by token."""
        return self.accept is TOKEN_MATCHING.accept


@dataclass(frozen=True)
class StepCounts:
    """What the statistics need to know of a row's step."""

    num_nodes: int  # of the draft, root and lookahead nodes included
    max_depth: int  # of nodes that may become text


@dataclass(frozen=True)
class AcceptedStep:
    """The outcome of a step; every list has one entry for each row."""

    paths: Sequence[AcceptedPath]  # that became text
    counts: Sequence[StepCounts]


class SpoiledReadError(Exception):
    """A node that overflowed spoiled what the target says after others: its weight is 0 there, but 0 x NaN is NaN."""


def check_read(logits: Tensor, may_be_spoiled: Sequence[bool]) -> None:
    """Raise a [`SpoiledReadError`] if such rows hold NaN after some node of a draft; roots alone are what they are."""
    if logits.shape[1] > 1 and any(compress(logits[..., 0].isnan().any(-1).tolist(), may_be_spoiled)):
        raise SpoiledReadError


VERIFIERS: dict[str, Verifier] = {}


def register_verifier(verifier: Verifier, replace: bool = False) -> Verifier:
    """Make a rule known by its name, so that `SpeculationConfig(verifier=name)` takes it.

    With `replace` it replaces the rule that has its name, as when the cell of a notebook runs again.

    Raises:
        [`OptionError`]: the name is taken.
    """
    if verifier.name in VERIFIERS and not replace:
        raise OptionError(
            f"The name of a verifier must be new, but {verifier.name!r} is taken. Choose another one, or pass "
            "`replace=True` for a rule of your own."
        )
    VERIFIERS[verifier.name] = verifier
    return verifier


def verifier_named(name: str) -> Verifier:
    """The rule of this name."""
    verifier = VERIFIERS.get(name)
    if verifier is None:
        raise OptionError(
            f"`verifier` must be one of {tuple(VERIFIERS)}, but it is {name!r}. If it is a rule of your own, import "
            "the module that calls `register_verifier` first."
        )
    return verifier


def _match(scores: NodeScores) -> AcceptedPath:
    return match_tokens(scores.tree, scores.token_after)


def _verifying_draws(rule: Callable[..., AcceptedPath]) -> Callable[[NodeScores], AcceptedPath]:
    return lambda scores: rule(scores.tree, scores.probs_after, scores.draws)


_DRAWN: dict[str, Any] = {"needs_draft_probs": True, "allows_grown_trees": False}
TOKEN_MATCHING = register_verifier(Verifier("token_matching", _match, asks_in_order=True, keeps_seeded_text=True))
register_verifier(Verifier("recursive_rejection", _verifying_draws(recursive_rejection), asks_in_order=True, **_DRAWN))
register_verifier(Verifier("traversal", _verifying_draws(traversal_verification), **_DRAWN))
register_verifier(Verifier("gumbel", _match, asks_in_order=True, couples_draws=True))
_BUILT_IN = tuple(VERIFIERS.values())


def verifier_of(drafter: Any, config: GenerationConfig) -> Verifier:
    """The rule of a call. Greedy decoding has one right answer, so it matches tokens whatever the option says."""
    return verifier_named(drafter.generation_config.verifier) if config.do_sample else TOKEN_MATCHING


def trees_of(draft: Draft, verifier: Verifier, is_open: Sequence[bool], device: torch.device) -> list[TokenTree]:
    """The draft of each row as the rule reads it; open rows with probabilities on `device` where it needs them."""
    parents = draft.parents.expand_as(draft.token_ids)
    if draft.is_lookahead is not None:  # nodes that are read, but never become text
        parents = parents.masked_fill(draft.is_lookahead.to(parents.device), -1)
    trees = list(map(TokenTree, parents.tolist(), draft.token_ids.tolist()))  # waits for the device once
    if not verifier.needs_draft_probs:
        return trees

    return [
        _drawn(tree, row, draft, verifier, device) if is_open[row] and not tree.is_root_alone else tree
        for row, tree in enumerate(trees)
    ]


def _drawn(tree: TokenTree, row: int, draft: Draft, verifier: Verifier, device: torch.device) -> DrawnTree:
    if draft.draft_probs is None or draft.dist_index is None or draft.is_lookahead is not None:
        raise OptionError(
            f'`verifier="{verifier.name}"` needs a draft that was drawn, with its distributions and without lookahead '
            f'nodes, but this drafter gives none. Set `drafter.generation_config.verifier = "{TOKEN_MATCHING.name}"`.'
        )

    probs: Tensor = draft.draft_probs[row].to(device)
    dist_index = draft.dist_index[min(row, len(draft.dist_index) - 1)].tolist()
    return DrawnTree(tree.parents, tree.token_ids, probs, dist_index)


def accepted_path(verifier: Verifier, scores: NodeScores, node: int, is_lockstep: bool) -> AcceptedPath:
    """The path that a row accepts from a node on; the next token alone where it must be text before another is."""
    if not verifier.is_token_matching and not scores.tree.is_root_alone:  # after a root alone all rules take its token
        scores.keeps_draw_states = verifier.keeps_seeded_text and scores.sequence.do_sample
        accepted = verifier.accept(scores)
        if verifier not in _BUILT_IN:
            _check_accepted(verifier, accepted, scores)
        return accepted

    can_choose_ahead = scores.sequence.can_choose_ahead and not is_lockstep
    if can_choose_ahead and scores.is_on_accelerator:
        scores.choose_all(node)
    elif not can_choose_ahead or scores.sequence.do_sample:
        return match_tokens(scores.tree, scores.token_after, node, max_tokens=1)

    return match_tokens(scores.tree, scores.token_after, node)


def _check_accepted(verifier: Verifier, accepted: Any, scores: NodeScores) -> None:
    """Raise an error unless a rule returned a path of the tree, with its tokens and a bonus token."""
    must = None
    if not isinstance(accepted, AcceptedPath):
        must = "an `AcceptedPath`"
    elif tuple(accepted.path[:1]) != (0,):
        must = "a path that begins at the root, node 0"
    elif len(accepted.token_ids) != len(accepted.path):
        must = "one token more than accepted ones: that after each node of `path`, the last being the bonus token"
    elif accepted.token_ids[-1] not in range(scores.logits.shape[-1]):
        must = "a bonus token of the target's vocabulary"
    else:
        steps = zip(accepted.path, accepted.token_ids, accepted.path[1:], strict=False)  # the last node has no child
        if any(scores.tree.child(node, token) != child for node, token, child in steps):
            must = "a path on which each node is a child of the last, and `token_ids[i]` the token of `path[i + 1]`"

    if must is not None:
        raise GenerationError(
            f"A verifier must return {must}, but `{verifier.name}` returned {accepted!r}. Mend the rule, or set "
            f'`drafter.generation_config.verifier = "{TOKEN_MATCHING.name}"`.'
        )
