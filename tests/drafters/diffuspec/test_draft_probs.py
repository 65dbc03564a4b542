"""What a diffusion draft may say it was drawn from: nothing, for its path is searched and not drawn, and why.

Every branch of drafting and verifying is taken and weighed; the text must have the target's distribution.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.core.test_rejection import RULES, Context, Language, context_of, largest_error, texts
from tests.reference import distribution
from transformers_falcon_spec.core.sampling import Draws
from transformers_falcon_spec.core.verification import DrawnTree, TokenTree, match_tokens
from transformers_falcon_spec.drafters.diffuspec.search import NgramProxy, PathScores, prune, search_path

CHAIN = [-1, 0, 1]


def _path(logits: torch.Tensor) -> list[int]:
    """What is drafted from logits `[positions, vocab]`: root, then the path that reads best."""
    lattice, proxy = prune(logits), NgramProxy.fit([[0, 1, 0, 1]], 2, logits.shape[-1])
    return [0, *search_path(PathScores(lattice, proxy, [0]))]


def _naive(logits: torch.Tensor) -> Callable[[Sequence[int], Language, Draws], DrawnTree]:
    """The searched path, handed over with the marginals as if it had been drawn from them."""

    def draft(parents: Sequence[int], drafter: Language, draws: Draws) -> DrawnTree:
        return DrawnTree(parents, _path(logits), logits.softmax(-1), [0, 1, -1])

    return draft


def _walked(logits: torch.Tensor, target: Language) -> Mapping[Context, float]:
    """Texts where the searched path is handed over without probabilities: the target draws, and the draft is compared."""
    path = _path(logits)

    def run(draws: Draws) -> Context:
        def target_token(node: int) -> int:
            return int(draws.categorical(target(context_of(CHAIN, path, node))[None]))

        text: Any = match_tokens(TokenTree(CHAIN[: len(path)], path), target_token).token_ids
        while len(text) < len(CHAIN):
            text = (*text, int(draws.categorical(target(text)[None])))
        return text

    return distribution(run)


def _one_hot(logits: torch.Tensor) -> Callable[[Sequence[int], Language, Draws], DrawnTree]:
    """The searched path as what it is, a draw from one point for each position."""

    def draft(parents: Sequence[int], drafter: Language, draws: Draws) -> DrawnTree:
        path = _path(logits)
        points = torch.nn.functional.one_hot(torch.tensor(path[1:]), logits.shape[-1]).double()
        return DrawnTree(parents, path, points, [0, 1, -1])

    return draft


class Coin(Language):
    """Two tokens, both as likely after any text."""

    def __call__(self, context: Context) -> torch.Tensor:
        return torch.tensor([0.5, 0.5], dtype=torch.double)


@pytest.mark.parametrize("rule", RULES)
def test_marginals_for_a_searched_path_bias_the_text(rule: str) -> None:
    target, logits = Coin(2, seed=0), torch.zeros(2, 2)

    found = texts(RULES[rule], CHAIN, target, target, draw_tree=_naive(logits))

    first_two = {text[:2] for text, prob in found.items() if prob > 0}
    assert first_two == {
        tuple(_path(logits)[1:])
    }  # what the search likes is always accepted: nothing else is ever written
    assert largest_error(found, target) == pytest.approx(0.375)  # each of two texts .5, not one of eight


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("vocab_size", [2, 3])
def test_paths_with_their_points_keep_the_distribution(rule: str, vocab_size: int) -> None:
    target = Coin(2, seed=0) if vocab_size == 2 else Language(3, seed=1)
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(2)) * (vocab_size > 2)

    found = texts(RULES[rule], CHAIN, target, target, draw_tree=_one_hot(logits))

    assert sum(found.values()) == pytest.approx(1)
    assert largest_error(found, target) < 1e-6


@pytest.mark.parametrize("vocab_size", [2, 3])
def test_a_searched_path_without_probabilities_keeps_the_distribution(vocab_size: int) -> None:
    target = Coin(2, seed=0) if vocab_size == 2 else Language(3, seed=1)
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(2)) * (vocab_size > 2)

    found = _walked(logits, target)

    assert sum(found.values()) == pytest.approx(1)
    assert largest_error(found, target) < 1e-6
