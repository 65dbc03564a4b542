"""Rules for drawn drafts keep the target's distribution: every branch of drafting and verifying is taken and weighed.

Wrong rules that were seen in the wild go through the same harness, which must catch them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import ScriptedDraws, block_verification, distribution, path_to
from transformers_falcon_spec.core.sampling import Draws
from transformers_falcon_spec.core.verification import (
    AcceptedPath,
    DrawnTree,
    recursive_rejection,
    traversal_verification,
)
from transformers_falcon_spec.errors import DraftTreeError

Context = tuple[int, ...]
Rule = Callable[[DrawnTree, Callable[[int], Tensor], Draws], AcceptedPath]
RULES: dict[str, Rule] = {"recursive": recursive_rejection, "traversal": traversal_verification}

TOPOLOGIES = {  # parents, vocabulary
    "root alone": ([-1], 3),
    "chain of one": ([-1, 0], 4),
    "chain of two": ([-1, 0, 1], 3),
    "chain of three": ([-1, 0, 1, 2], 2),
    "two children": ([-1, 0, 0], 4),
    "all children": ([-1, 0, 0, 0], 3),
    "two, then one below the second": ([-1, 0, 0, 2], 3),
    "two by one": ([-1, 0, 0, 1, 2], 2),
    "two below the first": ([-1, 0, 0, 1, 1], 3),
    "full, depth two": ([-1, 0, 0, 1, 1, 2, 2], 2),
    "chain below a fork": ([-1, 0, 0, 1, 3], 2),
}


class Language:
    """Random distributions after every text, drawn once and kept; some are point masses, some have zeros."""

    def __init__(self, vocab_size: int, seed: int, kind: str = "dense") -> None:
        self.vocab_size, self.kind = vocab_size, kind
        self.generator = torch.Generator().manual_seed(seed)
        self.known: dict[Context, Tensor] = {}

    def __call__(self, context: Context) -> Tensor:
        if context not in self.known:
            probs = torch.rand(self.vocab_size, generator=self.generator, dtype=torch.double) ** 2 + 1e-3
            if self.kind == "zeros":
                probs[torch.randint(self.vocab_size, (1,), generator=self.generator)] = 0
            if self.kind == "points":
                probs = torch.zeros_like(probs)
                probs[torch.randint(self.vocab_size, (1,), generator=self.generator)] = 1
            self.known[context] = probs / probs.sum()
        return self.known[context]


def draw_tree(parents: Sequence[int], drafter: Language, draws: Draws) -> DrawnTree:
    """Children one after the other, without replacement, each node with draws of its own; what cannot be drawn is left out."""
    kept, tokens, dists, index = [-1], [0], [], [-1]  # parents and tokens of the nodes that were drawn
    new_name = {0: 0}
    for node, parent in enumerate(parents):
        if node == 0 or parent not in new_name:
            continue
        above = new_name[parent]
        probs = drafter(context_of(kept, tokens, above)).clone()
        if index[above] == -1:
            index[above] = len(dists)
            dists.append(probs.clone())
        probs[[tokens[other] for other, up in enumerate(kept) if up == above]] = 0
        if probs.sum() <= 0:
            continue
        new_name[node] = len(kept)
        tokens.append(int(draws.categorical((probs / probs.sum())[None])))
        kept.append(above)
        index.append(-1)
    return DrawnTree(kept, tokens, torch.stack(dists) if dists else torch.zeros(0, drafter.vocab_size), index)


def context_of(parents: Sequence[int], tokens: Sequence[int], node: int) -> Context:
    return tuple(tokens[index] for index in path_to(parents, node)[1:])


def texts(
    rule: Rule, parents: Sequence[int], target: Language, drafter: Language, **changes: Any
) -> Mapping[Context, float]:
    """The probability of each text of depth + 1 tokens: a draft, what is accepted, and the target alone for the rest."""
    length = max(len(path_to(parents, node)) for node in range(len(parents)))
    make_tree = changes.get("draw_tree", draw_tree)

    def run(draws: Draws) -> Context:
        tree = make_tree(parents, drafter, draws)
        path = rule(tree, lambda node: target(context_of(tree.parents, tree.token_ids, node)), draws)
        text = path.token_ids
        while len(text) < length:
            text = (*text, int(draws.categorical(target(text)[None])))
        return text[:length]

    return distribution(run)


def largest_error(found: Mapping[Context, float], target: Language) -> float:
    """The largest difference between the probability of a text and the target's own."""
    texts: dict[Context, float] = {(): 1.0}
    for _ in range(len(next(iter(found)))):
        texts = {
            (*text, token): prob * float(target(text)[token])
            for text, prob in texts.items()
            for token in range(target.vocab_size)
        }
    assert set(found) <= set(texts)
    return max(abs(found.get(text, 0.0) - prob) for text, prob in texts.items())


@pytest.mark.parametrize(
    ("target_kind", "drafter_kind"), [("dense", "dense"), ("zeros", "zeros"), ("points", "dense"), ("dense", "points")]
)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", RULES)
def test_the_text_has_the_targets_distribution(name: str, topology: str, target_kind: str, drafter_kind: str) -> None:
    parents, vocab_size = TOPOLOGIES[topology]
    target, drafter = Language(vocab_size, seed=1, kind=target_kind), Language(vocab_size, seed=2, kind=drafter_kind)

    found = texts(RULES[name], parents, target, drafter)

    assert sum(found.values()) == pytest.approx(1)
    assert largest_error(found, target) < 1e-6


@pytest.mark.parametrize("name", RULES)
def test_a_drafter_that_is_the_target_is_never_refused_on_a_chain(name: str) -> None:
    parents, language = [-1, 0, 1, 2], Language(3, seed=3)

    lengths = distribution(
        lambda draws: len(
            RULES[name](
                tree := draw_tree(parents, language, draws),
                lambda node: language(context_of(parents, tree.token_ids, node)),
                draws,
            ).path
        )
    )

    assert lengths == {4: pytest.approx(1)}


def mean_accepted(rule: Rule, parents: Sequence[int], seed: int, vocab_size: int = 3) -> float:
    """Expected number of accepted tokens."""
    target, drafter = Language(vocab_size, seed=seed), Language(vocab_size, seed=seed + 100)

    def run(draws: Draws) -> int:
        tree = draw_tree(parents, drafter, draws)
        return rule(tree, lambda node: target(context_of(tree.parents, tree.token_ids, node)), draws).num_accepted

    return sum(count * prob for count, prob in distribution(run).items())


@pytest.mark.parametrize("seed", range(4))
def test_on_a_chain_traversal_is_block_verification_and_never_worse_than_recursion(seed: int) -> None:
    chain = [-1, 0, 1, 2]
    target, drafter = Language(2, seed=seed), Language(2, seed=seed + 100)

    found, expected = (texts(rule, chain, target, drafter) for rule in (traversal_verification, block_verification))
    accepted = {
        rule: mean_accepted(rule, chain, seed, 2)
        for rule in (traversal_verification, block_verification, recursive_rejection)
    }

    assert found == pytest.approx(expected)
    assert accepted[traversal_verification] == pytest.approx(accepted[block_verification])
    assert accepted[traversal_verification] >= accepted[recursive_rejection] - 1e-12


def test_traversal_keeps_more_of_a_tree_than_recursion() -> None:
    tree = [-1, 0, 0, 1, 2]
    gains = [
        mean_accepted(traversal_verification, tree, seed) - mean_accepted(recursive_rejection, tree, seed)
        for seed in range(2)
    ]

    assert min(gains) > 0.001


def test_a_token_that_cannot_have_been_drawn_is_refused() -> None:
    tree = DrawnTree([-1, 0], [0, 2], torch.tensor([[0.5, 0.5, 0.0]]), [0, -1])

    with pytest.raises(DraftTreeError, match="token 2 of node 1 has none"):
        recursive_rejection(tree, lambda _: torch.full((3,), 1 / 3), ScriptedDraws())


# What was seen elsewhere, and is wrong.


def marginals_for_a_fixed_path(parents: Sequence[int], drafter: Language, draws: Draws) -> DrawnTree:
    """The best tokens are taken, nothing is drawn, but the softmax is handed over as if it had been."""
    tokens: list[int] = [0]
    for node in range(1, len(parents)):
        best = drafter(context_of(parents, tokens, parents[node])).argsort(descending=True).tolist()
        taken = [tokens[other] for other in range(1, node) if parents[other] == parents[node]]
        tokens.append(next(token for token in best if token not in taken))
    dists = torch.stack([drafter(context_of(parents, tokens, node)) for node in range(len(parents))])
    return DrawnTree(parents, tokens, dists, list(range(len(parents))))


def one_draw_for_all_parents(parents: Sequence[int], drafter: Language, draws: Draws) -> DrawnTree:
    """Nodes of one depth share the children that were drawn once."""
    tree = draw_tree(parents, drafter, draws)
    tokens, first = list(tree.token_ids), {}
    for node in range(1, len(tokens)):
        position = (len(path_to(tree.parents, node)), tree.children(tree.parents[node]).index(node))
        tokens[node] = first.setdefault(position, tokens[node])
    dists = torch.stack([drafter(context_of(tree.parents, tokens, node)) for node in range(len(tokens))])
    return DrawnTree(tree.parents, tokens, dists, list(range(len(tokens))))


def the_distribution_of_the_next_depth(parents: Sequence[int], drafter: Language, draws: Draws) -> DrawnTree:
    """Blocks are misaligned by one: tokens come with the distribution of their own children."""
    tree = draw_tree(parents, drafter, draws)
    dists = torch.stack(
        [drafter((*context_of(tree.parents, tree.token_ids, node), 0)) for node in range(len(tree.parents))]
    )
    return DrawnTree(tree.parents, tree.token_ids, dists, list(range(len(tree.parents))))


def only_tokens_that_look_good(parents: Sequence[int], drafter: Language, draws: Draws) -> DrawnTree:
    """The set of children depends on what was drawn: the second child is kept only where it is token 1."""
    tree = draw_tree(parents, drafter, draws)
    if len(tree.parents) < 3 or tree.token_ids[2] == 1:
        return tree
    return DrawnTree(tree.parents[:2], tree.token_ids[:2], tree.draft_probs, tree.dist_index[:2])


def siblings_stay_in_the_draft(tree: DrawnTree, target_probs: Any, draws: Draws) -> AcceptedPath:
    """Each child is verified by the distribution of the first one, as if no sibling had been taken out before it."""
    node, tokens = 0, []
    while True:
        target, next_node = target_probs(node), None
        for child in tree.children(node):
            draft, token = tree.draft_probs[tree.dist_index[node]], tree.token_ids[child]
            prob = min(1.0, float(target[token] / draft[token]))
            if int(draws.categorical(torch.tensor([[prob, 1 - prob]], dtype=torch.double))) == 0:
                next_node = child
                break
            left = (target - draft).clamp(min=0)
            target = left / left.sum() if left.sum() > 0 else target
        if next_node is None:
            return AcceptedPath(tree.path_to(node), (*tokens, int(draws.categorical(target[None]))))
        node, tokens = next_node, [*tokens, tree.token_ids[next_node]]


def one_number_for_every_test(tree: DrawnTree, target_probs: Any, draws: Draws) -> AcceptedPath:
    """A single draw from 10 equal parts of [0, 1) decides every acceptance of the step."""
    number = (int(draws.categorical(torch.full((1, 10), 0.1))) + 0.5) / 10

    class Reused:
        def categorical(self, probs: Tensor) -> Tensor:
            is_test = probs.shape[-1] == 2  # tokens are 3
            return torch.tensor([int(number > float(probs[0, 0]))]) if is_test else draws.categorical(probs)

    return recursive_rejection(tree, target_probs, Reused())


WRONG_DRAFTS = {
    "marginals for a fixed path": (marginals_for_a_fixed_path, [-1, 0, 1]),
    "one draw for all parents": (one_draw_for_all_parents, [-1, 0, 0, 1, 2]),
    "blocks misaligned": (the_distribution_of_the_next_depth, [-1, 0, 1]),
    "children chosen by their draws": (only_tokens_that_look_good, [-1, 0, 0]),
}
WRONG_RULES = {
    "siblings stay in the draft": (siblings_stay_in_the_draft, [-1, 0, 0]),
    "one draw for every test": (one_number_for_every_test, [-1, 0, 1]),
}


@pytest.mark.parametrize("name", WRONG_DRAFTS)
@pytest.mark.parametrize("rule", RULES)
def test_wrong_drafts_are_caught(rule: str, name: str) -> None:
    wrong, parents = WRONG_DRAFTS[name]
    target, drafter = Language(3, seed=1), Language(3, seed=2)

    assert largest_error(texts(RULES[rule], parents, target, drafter, draw_tree=wrong), target) > 1e-3


@pytest.mark.parametrize("name", WRONG_RULES)
def test_wrong_rules_are_caught(name: str) -> None:
    wrong, parents = WRONG_RULES[name]
    target, drafter = Language(3, seed=1), Language(3, seed=2)

    assert largest_error(texts(wrong, parents, target, drafter), target) > 1e-3
