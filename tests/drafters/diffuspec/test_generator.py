"""Drafts of a diffusion drafter: what is searched is what is drafted, within every limit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.diffuspec.naive import best_of_each
from tests.drafters.diffuspec.naive_model import naive_logits
from tests.drafters.diffuspec.stand_ins import make_diffusion
from tests.tiny import make_target
from transformers_falcon_spec.drafters.diffuspec.drafter import DiffusionCandidateGenerator
from transformers_falcon_spec.drafters.diffuspec.search import NgramProxy, PathScores, prune, search_path, tree_over
from transformers_falcon_spec.generation.drafting import Committed, Draft, DraftBudget
from transformers_falcon_spec.generation.target import Target

TEXTS = ([5, 9, 11, 40, 22, 5], [7, 8, 60, 61, 62, 63, 64, 12, 33])
FREE = DraftBudget((30,), 100)


def generator_of(drafter: Any, target: Any, seed: int = 0) -> DiffusionCandidateGenerator:
    rng = torch.Generator().manual_seed(seed)
    return drafter.candidate_generator(Target(target, ()), 200, rng)


def committed(texts: Any, num_new: tuple[int, ...] | None = None) -> Committed:
    ids = torch.zeros(len(texts), 50, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    lengths = tuple(map(len, texts))
    return Committed(ids, lengths, lengths if num_new is None else num_new, None)


def draft_of(
    drafter: Any, target: Any, texts: Any = TEXTS[:1], budget: DraftBudget = FREE, seed: int = 0
) -> Draft | None:
    generator = generator_of(drafter, target, seed)
    generator.commit(committed(texts))
    return generator.propose(budget)


def naive_scores(drafter: Any, text: list[int], num: int) -> Tensor:
    """Logits over the target's tokens, without those that it never writes after a text."""
    logits = naive_logits(drafter, text, [drafter.config.mask_token_id] * num)[:, :97]
    return logits.index_fill(1, torch.tensor([0, 1]), -torch.inf)  # padding, and what begins a text


@pytest.fixture
def target() -> Any:
    return make_target().double()


def paths(draft: Draft, row: int = 0) -> list[list[int]]:
    """Tokens of each root-to-leaf path of a row, sorted."""
    ids, parents = draft.token_ids[row].tolist(), draft.parents[min(row, len(draft.parents) - 1)].tolist()
    found = []
    for node in range(len(ids)):
        if node not in parents and (node == 0 or parents[node] >= 0):
            path = [node]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            found.append([ids[node] for node in reversed(path)])
    return sorted(found)


@pytest.mark.parametrize("attention", ["full", "prefix_causal"])
@pytest.mark.parametrize("shift", [0, 1])
def test_without_a_proxy_a_path_is_the_best_token_of_every_position(target: Any, attention: str, shift: int) -> None:
    drafter = make_diffusion(target, attention=attention, logits_shift=shift)

    draft = draft_of(drafter, target)

    assert draft is not None
    assert paths(draft) == [[TEXTS[0][-1], *naive_scores(drafter, TEXTS[0], 5).argmax(-1).tolist()]]
    assert draft.draft_probs is None
    assert draft.num_passes == 1


@pytest.mark.parametrize("has_proxy", [True, False])
def test_a_searched_draft_is_what_the_search_finds(target: Any, has_proxy: bool) -> None:
    drafter = make_diffusion(target, search="cps", mass=0.9, max_candidates=8, beam_width=2, model_weight=0.3)
    trained = [[5, 70, 71, 72, 73], list(range(3, 97))]
    if has_proxy:
        drafter.proxy = NgramProxy.fit(trained, 3, 97)

    draft = draft_of(drafter, target)

    proxy = NgramProxy.fit([*trained, TEXTS[0]], 3, 97) if has_proxy else None  # it reads the text as well
    lattice = prune(naive_scores(drafter, TEXTS[0], 5), 0.9, 8, [2])
    path = search_path(PathScores(lattice, proxy, TEXTS[0][-2:], 0.3), 2)
    assert draft is not None
    assert paths(draft) == [[5, *path]]
    assert has_proxy == (path != best_of_each(lattice))


def test_a_tree_is_that_over_the_lattice(target: Any) -> None:
    drafter = make_diffusion(target, search="tree", num_tree_nodes=9)
    drafter.proxy = NgramProxy.fit([list(range(3, 97))], 2, 97)

    draft = draft_of(drafter, target)

    lattice = prune(naive_scores(drafter, TEXTS[0], 5), 0.8, 15, [2])
    scores = PathScores(lattice, NgramProxy.fit([list(range(3, 97)), TEXTS[0]], 2, 97), TEXTS[0][-2:], 0.5)
    tree = tree_over(scores, root=5, num_nodes=9)
    assert draft is not None
    assert draft.token_ids.tolist() == [tree.token_ids]
    assert draft.parents.tolist() == [tree.parents]
    assert len(paths(draft)) > 1


def test_each_row_is_drafted_as_if_alone(target: Any) -> None:
    for search in ("cps", "tree"):
        drafter = make_diffusion(target, search=search, num_tree_nodes=7)
        together = draft_of(drafter, target, TEXTS, DraftBudget((30, 2), 100))
        assert together is not None
        for row, depth in enumerate((30, 2)):
            alone = draft_of(drafter, target, TEXTS[row : row + 1], DraftBudget((depth,), 100))
            assert alone is not None
            assert paths(together, row) == paths(alone)
            assert max(map(len, paths(together, row))) - 1 <= depth


@pytest.mark.parametrize(
    ("budget", "num"),
    [
        (DraftBudget((3,), 100), 3),
        (DraftBudget((30,), 4), 3),
        (DraftBudget((30,), 100, num_passes=1), 5),
        (DraftBudget((0,), 100), None),
        (DraftBudget((30,), 1), None),
        (DraftBudget((30,), 100, num_passes=0), None),
    ],
)
def test_the_budget_is_obeyed(target: Any, budget: DraftBudget, num: int | None) -> None:
    draft = draft_of(make_diffusion(target), target, budget=budget)

    assert (None if draft is None else draft.token_ids.shape[1] - 1) == num


def test_a_target_that_reads_chains_alone_gets_the_best_path(target: Any) -> None:
    budget = replace(FREE, is_chain=True)
    tree, path = (draft_of(make_diffusion(target, search=search), target, budget=budget) for search in ("tree", "cps"))

    assert tree is not None
    assert path is not None
    assert tree.token_ids.equal(path.token_ids)
    assert tree.parents.equal(path.parents)


def test_a_draft_that_says_the_text_is_over_ends_there(target: Any) -> None:
    target.config.eos_token_id = [2, 50]
    drafter = make_diffusion(target)
    with torch.no_grad():
        drafter.model.get_output_embeddings().weight[50] *= 30

    for search in ("cps", "tree"):
        drafter.config.search = search
        drafts = [
            draft_of(drafter, target, [[*text]]) for text in ([5, 6], [9, 8, 7], [20, 30], [40, 41, 42], [11, 12])
        ]
        found = [path for draft in drafts if draft is not None for path in paths(draft)]
        assert any(50 in path for path in found)
        assert all(50 not in path[1:-1] for path in found)
        assert any(len(path) == 2 and path[1] == 50 for path in found)  # nothing but the end


def test_lengths_adapt_row_by_row_to_what_was_kept(target: Any) -> None:
    drafter = make_diffusion(
        target, draft_length="adaptive", min_draft_tokens=2, growth=2, smoothing=1.0, block_size=8
    )
    best = [naive_scores(drafter, text, 8).argmax(-1).tolist() for text in TEXTS]
    end = next(token for offset, token in enumerate(best[0]) if offset > 1 and token not in best[0][:offset])
    drafter.config.eos_token_id = end
    num_generated = [[*tokens, end].index(end) for tokens in best]  # before the text seems to end
    budget, lengths = DraftBudget((30, 30), 100), []

    for num_kept in ((num_generated[0], 0), (0, num_generated[1])):
        generator = generator_of(drafter, target)
        generator.commit(committed(TEXTS))
        first = generator.propose(budget)
        assert first is not None
        assert [len(paths(first, row)[0]) - 1 for row in (0, 1)] == [min(num + 1, 8) for num in num_generated]
        texts = [text + [40] * (num + 1) for text, num in zip(TEXTS, num_kept, strict=True)]
        generator.commit(committed(texts, tuple(num + 1 for num in num_kept)))
        lengths.append([row.draft_length.length for row in generator._rows])

    assert 1 < num_generated[0] < 7
    kept, lost = ([min(max(num + more, 2), 8) for num in num_generated] for more in (2, 0))
    assert lengths == [[kept[0], lost[1]], [lost[0], kept[1]]]


def test_what_was_not_asked_for_teaches_no_length(target: Any) -> None:
    drafter = make_diffusion(target, draft_length="adaptive", min_draft_tokens=1, growth=0)
    generator = generator_of(drafter, target)

    for number in range(3):  # plain steps
        generator.commit(committed([TEXTS[0] + [9] * number], num_new=(len(TEXTS[0]) if not number else 1,)))
    draft = generator.propose(FREE)

    assert draft is not None
    assert draft.token_ids.shape[1] == 6


def test_known_noise_is_taken_into_account(target: Any) -> None:
    drafter = make_diffusion(target)
    noises = torch.empty(2, 6, 97).exponential_(generator=torch.Generator().manual_seed(0))
    budget = DraftBudget((30, 30), 100, temperature=0.8, noise=lambda row, depth: noises[row, depth])

    draft = draft_of(drafter, target, TEXTS, budget)

    assert draft is not None
    assert draft.draft_probs is None
    for row in (0, 1):
        probs = torch.softmax(naive_scores(drafter, TEXTS[row], 5) / 0.8, dim=-1)
        best = (probs / noises[row, 1:6]).argmax(-1).tolist()
        assert paths(draft, row) == [[TEXTS[row][-1], *best]]


def test_tokens_that_the_model_lacks_are_neither_drafted_nor_in_its_way(target: Any) -> None:
    drafter = make_diffusion(target, draft_vocab_size=40)

    draft = draft_of(drafter, target, [[5, 9, 96]])

    assert draft is not None
    assert (draft.token_ids[0, 1:] < 40).all()
