"""The rules that decide which part of a draft becomes text: a `Verifier` object for each, registered by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from ..core.verification import AcceptedPath, match_tokens, recursive_rejection, traversal_verification
from ..errors import OptionError

if TYPE_CHECKING:
    from .acceptors import NodeScores


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
        needs_draft_probs (`bool`): It verifies tokens that were drawn, and needs the distributions drawn from. Trees
            do not grow then, as their shape must not depend on what was drawn.
        asks_in_order (`bool`): It asks for scores of accepted nodes only, once each and in their order. This is needed
            by processors that remember their calls (guidance, SynthID); without it such calls are refused.
        keeps_seeded_text (`bool`): With a seed it writes the text that the target alone writes with that seed, as do
            rules that draw through `token_after` alone. What is drafted then changes no text, so the tuner chooses it.
        couples_draws (`bool`): Draws come from a stream that drafters can foresee.

    Example:

    ```python
    >>> from types import SimpleNamespace
    >>> from transformers_falcon_spec.core.verification import TokenTree
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
    accept: Callable[["NodeScores"], AcceptedPath]
    needs_draft_probs: bool = False
    asks_in_order: bool = False
    keeps_seeded_text: bool = False
    couples_draws: bool = False

    @property
    def is_token_matching(self) -> bool:
        """Whether the rule is token matching to its end, so that a row can be written token by token."""
        return self.accept is TOKEN_MATCHING.accept


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


def _match(scores: "NodeScores") -> AcceptedPath:
    return match_tokens(scores.tree, scores.token_after)


def _verifying_draws(rule: Callable[..., AcceptedPath]) -> Callable[["NodeScores"], AcceptedPath]:
    return lambda scores: rule(scores.tree, scores.probs_after, scores.draws)


TOKEN_MATCHING = register_verifier(Verifier("token_matching", _match, asks_in_order=True, keeps_seeded_text=True))
register_verifier(
    Verifier("recursive_rejection", _verifying_draws(recursive_rejection), needs_draft_probs=True, asks_in_order=True)
)
register_verifier(Verifier("traversal", _verifying_draws(traversal_verification), needs_draft_probs=True))
register_verifier(Verifier("gumbel", _match, asks_in_order=True, couples_draws=True))
BUILT_IN = tuple(VERIFIERS.values())


def verifier_of(drafter: Any, config: GenerationConfig) -> Verifier:
    """The rule of a call. Greedy decoding has one right answer, so it matches tokens whatever the option says."""
    return verifier_named(drafter.generation_config.verifier) if config.do_sample else TOKEN_MATCHING
