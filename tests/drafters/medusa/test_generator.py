"""Drafting with Medusa: the generator against its naive twin, row by row, within its budget, best or drawn."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.drafters.medusa.makers import make_medusa
from tests.drafters.medusa.twin import naive_draft, naive_head
from tests.drafters.trees import Lists, random_tree
from tests.reference import path_to
from tests.tiny import VOCAB_SIZE, make_target
from transformers_falcon_spec import Draft, MedusaDrafter
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget
from transformers_falcon_spec.generation.target import Target

WIDTH = 16
AMPLE = DraftBudget((100,), 512)
TREE = random_tree(4, 20, seed=3)


@pytest.fixture(scope="module")
def target() -> Any:
    model = make_target(hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    return Target(model.double().requires_grad_(False), (-1,))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make(target: Target, tree: Lists = TREE, **options: Any) -> MedusaDrafter:
    return make_medusa(target.model, draft_tree={"parents": tree[0], "ranks": tree[1]}, **options)


def start(drafter: MedusaDrafter, target: Target) -> Any:
    return drafter.candidate_generator(target, 1000, torch.Generator().manual_seed(0))


class Rows:
    """Random text of several rows with random features, given to a generator in pieces."""

    def __init__(self, num_rows: int = 1, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, VOCAB_SIZE, (num_rows, 100), generator=self.generator)
        self.features = torch.randn(num_rows, 99, WIDTH, dtype=torch.double, generator=self.generator)
        self.num_pairs = [0] * num_rows

    def more(self, *num_new: int) -> Committed:
        """The next pairs of each row: token p + 1 with feature p; what fills shorter rows must never be read."""
        pieces = torch.full((len(num_new), max(num_new), WIDTH), 1e3, dtype=torch.double)
        for row, num in enumerate(num_new):
            pieces[row, :num] = self.features[row, self.num_pairs[row] : self.num_pairs[row] + num]
            self.num_pairs[row] += num
        return Committed(self.ids, tuple(pairs + 1 for pairs in self.num_pairs), num_new, pieces)

    def root(self, row: int = 0) -> int:
        return int(self.ids[row, self.num_pairs[row]])

    def newest(self, row: int = 0) -> torch.Tensor:
        return self.features[row, self.num_pairs[row] - 1]


def expected(drafter: MedusaDrafter, target: Target, feature: torch.Tensor, tree: Lists) -> list[int]:
    return naive_draft(drafter.state_dict(), target.head, feature, *tree)


def cut(tree: Lists, max_depth: int, num_nodes: int, is_chain: bool) -> Lists:
    """The part of a tree within limits, node by node."""
    kept: list[int] = []
    for node, parent in enumerate(tree[0]):
        has_sibling = any(tree[0][other] == parent for other in kept)
        is_open = parent == -1 or (parent in kept and not (is_chain and has_sibling))
        if is_open and len(path_to(tree[0], node)) - 1 <= max_depth and len(kept) < num_nodes:
            kept.append(node)
    return [kept.index(tree[0][node]) if node else -1 for node in kept], [tree[1][node] for node in kept]


@pytest.mark.parametrize("has_lm_heads", [True, False])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_every_node_takes_its_rank_from_the_head_of_its_depth(
    target: Target, num_layers: int, has_lm_heads: bool
) -> None:
    drafter = make(target, num_layers=num_layers, has_lm_heads=has_lm_heads)
    text, generator = Rows(), start(drafter, target)

    for num_new in (5, 1, 3, 1):
        generator.commit(text.more(num_new))
        draft = generator.propose(AMPLE)

        assert draft.parents[0].tolist() == TREE[0]
        assert draft.token_ids[0].tolist() == [text.root(), *expected(drafter, target, text.newest(), TREE)]
        assert draft.num_passes == 1


@pytest.mark.parametrize(
    "budget",
    [
        DraftBudget((2,), 512),
        DraftBudget((100,), 7),
        DraftBudget((3,), 6, is_chain=True),
        DraftBudget((100,), 512, is_chain=True),
        DraftBudget((100,), 512, num_passes=1),
    ],
)
def test_a_draft_is_the_part_of_the_tree_within_the_budget(target: Target, budget: DraftBudget) -> None:
    drafter = make(target)
    text, generator = Rows(), start(drafter, target)
    generator.commit(text.more(4))

    draft = generator.propose(budget)

    tree = cut(TREE, budget.depths[0], budget.num_nodes, budget.is_chain)
    assert draft.parents[0].tolist() == tree[0]
    assert draft.token_ids[0, 1:].tolist() == expected(drafter, target, text.newest(), tree)


@pytest.mark.parametrize(
    "budget", [DraftBudget((0,), 512), DraftBudget((9,), 1), DraftBudget((9,), 512, num_passes=0)]
)
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_without_budget_there_is_the_root_alone_and_no_pass(
    target: Target, budget: DraftBudget, temperature: float | None
) -> None:
    text, generator = Rows(), start(make(target), target)
    generator.commit(text.more(4))

    draft = generator.propose(DraftBudget(budget.depths, budget.num_nodes, budget.num_passes, temperature=temperature))

    assert (draft.token_ids.tolist(), draft.parents.tolist(), draft.num_passes) == ([[text.root()]], [[-1]], 0)


def test_rows_draft_from_their_own_newest_features_within_their_own_depths(target: Target) -> None:
    drafter = make(target)
    text, generator = Rows(num_rows=3), start(drafter, target)
    depths = torch.tensor([len(path_to(TREE[0], node)) - 1 for node in range(len(TREE[0]))])

    for num_new, limits in (((7, 0, 2), (9, 9, 9)), ((1, 3, 1), (9, 2, 9)), ((2, 1, 0), (3, 9, 0))):
        generator.commit(text.more(*num_new))
        draft = generator.propose(DraftBudget(limits, 512))

        for row, limit in enumerate(limits):
            limit = limit if text.num_pairs[row] else 0  # noqa: PLW2901  no feature, nothing to draft from
            parents = torch.tensor(TREE[0]).where(depths <= limit, -1)
            assert (
                draft.parents[min(row, len(draft.parents) - 1)].tolist() == parents.tolist()[: draft.parents.shape[1]]
            )
            assert draft.token_ids[row, 0] == text.root(row)
            if limit:
                tokens = torch.tensor(expected(drafter, target, text.newest(row), TREE))
                is_kept = (depths <= limit)[1:]
                assert draft.token_ids[row, 1:][is_kept].tolist() == tokens[is_kept].tolist()


def test_without_any_feature_a_plain_step_is_asked_for(target: Target) -> None:
    text, generator = Rows(), start(make(target), target)
    generator.commit(text.more(0))

    assert generator.propose(AMPLE) is None


def test_a_finished_row_keeps_its_root_and_disturbs_nobody(target: Target) -> None:
    drafter = make(target)
    text, generator = Rows(num_rows=2), start(drafter, target)
    generator.commit(text.more(3, 3))
    generator.commit(text.more(2, 0))

    draft = generator.propose(DraftBudget((9, 0), 512))

    assert draft.token_ids[1, 0] == text.root(1)
    assert draft.parents[1].tolist() == [-1] * len(TREE[0])
    assert draft.token_ids[0, 1:].tolist() == expected(drafter, target, text.newest(0), TREE)


def drawn(target: Target, drafter: MedusaDrafter, seed: int, **options: Any) -> Draft:
    generator = drafter.candidate_generator(target, 1000, torch.Generator().manual_seed(seed))
    generator.commit(Rows().more(5))
    return generator.propose(DraftBudget((100,), 512, temperature=0.7, **options))


@pytest.mark.parametrize("has_lm_heads", [True, False])
def test_drawn_children_say_which_head_they_were_drawn_from(target: Target, has_lm_heads: bool) -> None:
    drafter, text = make(target, has_lm_heads=has_lm_heads), Rows()
    text.more(5)

    draft = drawn(target, drafter, 0)

    parents, tokens = TREE[0], draft.token_ids[0].tolist()
    for node in range(len(parents)):
        children = [tokens[child] for child in range(len(parents)) if parents[child] == node]
        assert len(set(children)) == len(children)
        dist = int(draft.dist_index[0, node])
        assert (dist >= 0) == bool(children)
        if children:
            logits = naive_head(drafter.state_dict(), len(path_to(parents, node)) - 1, text.newest(), target.head)
            probs = torch.softmax(logits.float() / 0.7, dim=-1)
            torch.testing.assert_close(draft.draft_probs[0, dist].float(), probs, rtol=1e-4, atol=1e-6)


def test_each_parent_draws_anew_and_from_the_distribution_of_its_children(target: Target) -> None:
    tree = ([-1, 0, 0, 1, 2], [-1, 0, 1, 0, 0])
    drafter = make(target, tree, num_heads=2)

    drafts = [drawn(target, drafter, seed) for seed in range(600)]

    assert any(draft.token_ids[0, 3] != draft.token_ids[0, 4] for draft in drafts)
    for node in (1, 4):
        probs = drafts[0].draft_probs[0, drafts[0].dist_index[0, tree[0][node]]]
        found = torch.tensor([draft.token_ids[0, node].item() for draft in drafts])
        for token in probs.topk(3).indices.tolist():
            share, prob = float((found == token).float().mean()), float(probs[token])
            assert abs(share - prob) < 4 * (prob * (1 - prob) / len(drafts)) ** 0.5 + 1e-3


def test_foreseen_noise_is_that_of_the_depth_and_the_same_for_every_parent(target: Target) -> None:
    noises = torch.empty(6, VOCAB_SIZE).exponential_(generator=torch.Generator().manual_seed(4))
    drafter, text = make(target, ([-1, 0, 0, 1, 2, 2], [-1, 0, 1, 0, 0, 1]), num_heads=2), Rows()
    text.more(5)

    draft = drawn(target, drafter, 0, noise=lambda row, depth: noises[depth])

    heads = [naive_head(drafter.state_dict(), head, text.newest(), target.head).float() for head in (0, 1)]
    best = [
        ((logits / 0.7).softmax(-1) / noise).argsort(descending=True).tolist()
        for logits, noise in zip(heads, noises[1:], strict=False)
    ]
    assert draft.draft_probs is None
    assert draft.token_ids[0, 1:].tolist() == [*best[0][:2], best[1][0], *best[1][:2]]


def test_a_tree_deeper_than_the_heads_is_refused(target: Target) -> None:
    with pytest.raises(OptionError, match=r"must end at depth 2, but .* reaches depth 4"):
        make(target, num_heads=2).check_target(target.model)  # before anything is read


def test_drafting_leaves_the_global_random_state_alone(target: Target) -> None:
    drafter, before = make(target), torch.get_rng_state()

    drawn(target, drafter, 0)

    assert torch.equal(before, torch.get_rng_state())
