"""Rules for drawn drafts where probabilities are sharp, tiny or zero: every branch weighed, down to the smallest float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.core.strategies import parent_lists
from tests.core.test_rejection import RULES, Language, context_of, largest_error, texts
from tests.reference import ScriptedDraws, distribution
from transformers_falcon_spec.core.sampling import Draws
from transformers_falcon_spec.core.verification import DrawnTree
from transformers_falcon_spec.drafters.tree_drafting.proposing import draw_children
from transformers_falcon_spec.errors import DraftTreeError
from transformers_falcon_spec.generation.drafting import DraftBudget

SMALLEST = 2.0**-149  # that float32 knows, about 1.4e-45


class SharpLanguage(Language):
    """Probabilities in float32 over all its orders of magnitude, as a softmax leaves them, some of them zero."""

    def __init__(self, vocab_size: int, seed: int, most_bits: float, zeros: float) -> None:
        super().__init__(vocab_size, seed)
        self.most_bits, self.zeros = most_bits, zeros

    def __call__(self, context: tuple[int, ...]) -> Tensor:
        """The distribution after a text, not quite of sum 1."""
        if context not in self.known:
            noise = torch.rand(3, self.vocab_size, generator=self.generator, dtype=torch.double)
            probs = ((1 + noise[0]) * 2 ** (-self.most_bits * noise[1])).float()
            probs[noise[2] < self.zeros] = 0
            probs[torch.randint(self.vocab_size, (1,), generator=self.generator)] = 1
            self.known[context] = (probs / probs.sum()).clamp(max=1)
        return self.known[context]


def largest_sharp_error(rule: str, parents: list[int], target: SharpLanguage, drafter: SharpLanguage) -> float:
    found = texts(RULES[rule], parents, as_double(target), drafter, draw_tree=whole_tree)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    return largest_error(found, as_double(target))


def as_double(language: SharpLanguage) -> Language:
    """The same language in float64, with sum 1, for whoever compares probabilities."""

    class Exact(Language):
        def __call__(self, context: tuple[int, ...]) -> Tensor:
            probs = language(context).double()
            return probs / probs.sum()

    return Exact(language.vocab_size, 0)


def whole_tree(parents: list[int], drafter: SharpLanguage, draws: Draws) -> DrawnTree:
    """A tree of this very shape, as drafters fill it: siblings for which no token is left get one without probability."""
    tokens = [0]
    for node in range(1, len(parents)):
        taken = [tokens[other] for other in range(1, node) if parents[other] == parents[node]]
        probs = drafter(context_of(parents, tokens, parents[node])).double()
        probs[taken] = 0
        free = [token for token in range(drafter.vocab_size) if token not in taken]
        tokens.append(int(draws.categorical((probs / probs.sum())[None])) if probs.any() else free[0])
    probs = torch.stack([drafter(context_of(parents, tokens, node)) for node in range(len(parents))])
    return DrawnTree(parents, tokens, probs, list(range(len(parents))))


SHAPES = {"three children": [-1, 0, 0, 0], "a fork below a fork": [-1, 0, 0, 1, 1], "a chain": [-1, 0, 1]}


@pytest.mark.parametrize(
    ("most_bits", "zeros"), [(20, 0.0), (149, 0.0), (149, 0.5), (3, 0.6), (0, 0.9)],
    ids=["sharp", "subnormal", "subnormal and zero", "zeros", "points"],
)  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RULES)
def test_however_sharp_the_text_has_the_targets_distribution(
    name: str, shape: str, most_bits: float, zeros: float
) -> None:
    target, drafter = SharpLanguage(3, 1, most_bits / 2, zeros / 2), SharpLanguage(3, 2, most_bits, zeros)

    assert largest_sharp_error(name, SHAPES[shape], target, drafter) < 1e-12


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    parents=parent_lists(max_nodes=4).filter(lambda parents: max(map(parents.count, parents)) <= 3),
    seed=st.integers(0, 2**20),
    bits=st.tuples(st.integers(0, 149), st.integers(0, 149)),
    zeros=st.tuples(st.floats(0, 0.9), st.floats(0, 0.9)),
)
def test_no_tree_support_or_scale_moves_the_text(
    name: str, parents: list[int], seed: int, bits: tuple[int, int], zeros: tuple[float, float]
) -> None:
    target, drafter = SharpLanguage(3, seed, bits[0], zeros[0]), SharpLanguage(3, seed + 1, bits[1], zeros[1])

    assert largest_sharp_error(name, parents, target, drafter) < 1e-12


@pytest.mark.parametrize("tiny", [SMALLEST, 1e-40, 3e-39, 1e-30])
@pytest.mark.parametrize("name", RULES)
def test_the_rest_of_a_draft_may_be_as_small_as_float32_goes(name: str, tiny: float) -> None:
    probs, target = torch.tensor([[1.0, tiny, 0, 0]]), torch.tensor([0.5, 0.1, 0.4, 0])
    tree = DrawnTree([-1, 0, 0], [3, 0, 1], probs, [0, -1, -1])

    found = distribution(
        lambda draws: RULES[name](tree, lambda node: torch.ones(4) if node else target, draws).token_ids[0]
    )

    assert found == pytest.approx({0: 0.5, 1: 0.1, 2: 0.4})


@pytest.mark.parametrize("name", RULES)
def test_what_was_not_drawn_is_never_kept_nor_what_is_below_it(name: str) -> None:
    probs, asked = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0]]), []
    tree = DrawnTree([-1, 0, 0, 2], [0, 0, 1, 1], probs, [0, -1, 1, -1])

    def target_probs(node: int) -> Tensor:
        asked.append(node)
        return torch.tensor([0.25, 0.75, 0.0])

    paths = distribution(lambda draws: RULES[name](tree, target_probs, draws).path)

    assert paths == pytest.approx({(0, 1): 0.25, (0,): 0.75})
    assert set(asked) == {0, 1}


@pytest.mark.parametrize("name", RULES)
def test_a_token_without_probability_is_refused_while_others_have_some(name: str) -> None:
    tree = DrawnTree([-1, 0, 0], [0, 0, 2], torch.tensor([[0.5, 0.5, 0]]), [0, -1, -1])

    with pytest.raises(DraftTreeError, match="token 2 of node 2 has none while others have"):
        RULES[name](tree, lambda node: torch.tensor([0.0, 0.5, 0.5]), ScriptedDraws())


def drawn(probs: list[float], num_children: int, count: int) -> Tensor:
    """Children `[count, num_children]`, drawn again and again."""
    rows = torch.tensor(probs).expand(1, count, -1)
    budget = DraftBudget((1,), num_children + 1, temperature=1.0)
    return draw_children(rows, [1] * count, num_children, budget, torch.Generator().manual_seed(0))[0]


def test_tokens_with_probability_are_drawn_before_those_without() -> None:
    found = drawn([0.0, SMALLEST, 0.0, 1.0, 0.0, 2 * SMALLEST], 5, 2000)

    assert (found[:, 0] == 3).all()
    assert found[:, 1:3].sort().values.unique(dim=0).tolist() == [[1, 5]]
    assert all(len(set(row)) == 5 for row in found.tolist())


def test_what_is_left_after_a_sure_token_is_drawn_from_as_it_is() -> None:
    count = 20_000

    second = drawn([1.0, SMALLEST, 0.0, 3 * SMALLEST], 2, count)[:, 1]

    share = float((second == 3).float().mean())
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / count) ** 0.5
