"""Drafting: the generator against a naive twin without a cache, batches against single rows, draws against their distributions."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.drafters.eagle.kinds import KINDS, make_eagle, make_eagle_target, view
from tests.drafters.eagle.naive import NaiveEagle
from tests.drafters.texts import Text, assert_rows_draft_alone, cut, drafted, paths
from tests.drafters.trees import random_tree
from tests.growing import grown_paths
from transformers_falcon_spec import Draft, DraftTree, EagleDrafter
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget

AMPLE = DraftBudget((100,), 512)
ROUNDS = (3, 1, 1, 4, 2, 1, 6, 1)  # new pairs before each proposal
GROWN_BUDGETS = (  # and what is left of depth 4, top 3 and 9 nodes under each
    (AMPLE, (4, 3, 9)),
    (DraftBudget((100,), 512, is_chain=True), (4, 1, 9)),
    (DraftBudget((2,), 512), (2, 3, 9)),
    (DraftBudget((100,), 5), (4, 3, 5)),
    (DraftBudget((100,), 512, num_passes=3), (3, 3, 9)),
    (DraftBudget((1,), 3, num_passes=2, is_chain=True), (1, 1, 3)),
)
STATIC_BUDGETS = (
    AMPLE,
    DraftBudget((100,), 512, is_chain=True),
    DraftBudget((3,), 7),
    DraftBudget((9,), 9, num_passes=2),
)


@pytest.fixture(scope="module")
def target() -> Any:
    return make_eagle_target().requires_grad_(False)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def growing(target: Any, kind: str, **options: Any) -> EagleDrafter:
    return make_eagle(target, kind, **{"num_tree_nodes": 9, "tree_top_k": 3, **options})


def start(drafter: EagleDrafter, target: Any, seed: int = 0) -> Any:
    return drafter.candidate_generator(view(target, drafter), 1000, torch.Generator().manual_seed(seed))


def text_for(drafter: EagleDrafter, seed: int = 0) -> Text:
    return Text(seed, drafter.config.feature_size)


def commit(committed: Committed, generator: Any, twin: NaiveEagle) -> None:
    generator.commit(committed)
    (length,), (num_new,) = committed.lengths, committed.num_new
    twin.commit(committed.sequence_ids[0, length - num_new : length].tolist(), committed.features[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_grown_tree_is_that_of_reading_everything_anew(target: Any, kind: str) -> None:
    drafter = growing(target, kind)
    text, generator, twin = text_for(drafter), start(drafter, target), NaiveEagle(drafter, view(target, drafter))

    for number, num_new in enumerate(ROUNDS):
        commit(text.more(num_new), generator, twin)
        budget, limits = GROWN_BUDGETS[number % len(GROWN_BUDGETS)]
        draft = generator.propose(budget)

        assert paths(draft) == twin.grown(*limits)
        assert draft.token_ids[0, 0] == text.ids[0, text.num_pairs]
        assert draft.num_passes == limits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_tree_is_that_of_reading_everything_anew(target: Any, kind: str) -> None:
    tree = random_tree(4, 12, seed=3)
    drafter = growing(target, kind, dynamic_tree=False, draft_tree={"parents": tree[0], "ranks": tree[1]})
    text, generator, twin = text_for(drafter), start(drafter, target), NaiveEagle(drafter, view(target, drafter))

    for number, num_new in enumerate(ROUNDS):
        commit(text.more(num_new), generator, twin)
        budget = STATIC_BUDGETS[number % len(STATIC_BUDGETS)]
        draft, expected = generator.propose(budget), cut(tree, budget, 1)

        assert draft.parents[0].tolist() == expected[0]
        assert drafted(draft) == twin.static(*expected)


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_rows_of_a_batch_draft_what_each_would_alone(target: Any, kind: str, is_dynamic: bool) -> None:
    tree = random_tree(4, 12, seed=3)
    drafter = growing(target, kind, dynamic_tree=is_dynamic, draft_tree={"parents": tree[0], "ranks": tree[1]})
    texts = [text_for(drafter, seed) for seed in range(3)]
    together, alone = start(drafter, target), [start(drafter, target) for _ in texts]
    rounds = [(7, 0, 2), (9, 1, 4), (1, 3, 1), (5, 0, 2), (1, 0, 6), (4, 0, 1), (1, 2, 1)]
    rounds += [(0, 9, 1), (8, 0, 0), (0, 0, 9), (9, 1, 0)]

    assert_rows_draft_alone(together, alone, texts, rounds)

    assert together.text.cache.lengths.flatten().tolist() == [sum(num) for num in zip(*rounds, strict=True)]


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_after_a_proposal_the_cache_holds_the_committed_pairs_alone(target: Any, kind: str, is_dynamic: bool) -> None:
    drafter = growing(target, kind, dynamic_tree=is_dynamic)
    text, generator = text_for(drafter), start(drafter, target)

    for num_new in ROUNDS:
        generator.commit(text.more(num_new))
        generator.propose(AMPLE)

        assert generator.text.cache.lengths.tolist() == [[text.num_pairs]]
        for layer in generator.text.cache.layers:
            assert layer.held["keys"][:, :, : text.num_pairs].any()
            assert not layer.held["keys"][:, :, text.num_pairs :].any()


def test_several_commits_before_a_proposal_are_as_one(target: Any) -> None:
    drafter, found = growing(target, "eagle-3"), []

    for pieces in ([6, 1, 3], [10]):
        text, generator = text_for(drafter), start(drafter, target)
        for num_new in pieces:
            generator.commit(text.more(num_new))
        found.append(paths(generator.propose(AMPLE)))

    assert found[0] == found[1]


def test_no_room_means_the_root_alone_and_no_pairs_no_draft(target: Any) -> None:
    drafter = growing(target, "eagle-1")
    text, generator = text_for(drafter), start(drafter, target)
    generator.commit(text.more(0))
    assert generator.propose(AMPLE) is None
    generator.commit(text.more(4))

    draft = generator.propose(DraftBudget((0,), 512))

    assert paths(draft) == [()]
    assert draft.num_passes == 0


def test_drafting_leaves_the_global_random_state_alone(target: Any) -> None:
    drafter = growing(target, "eagle-1")
    generator, before = start(drafter, target), torch.get_rng_state()

    generator.commit(text_for(drafter).more(7))
    generator.propose(DraftBudget((100,), 512, temperature=0.7))

    assert before.equal(torch.get_rng_state())


TREE = DraftTree.from_lists([-1, 0, 0, 1, 1, 2, 3])


def drawn(target: Any, kind: str, seed: int, **budget: Any) -> tuple[Draft, NaiveEagle]:
    """A drawn draft, from a drafter whose tree would grow, and a twin that has read the same."""
    drafter = growing(target, kind, draft_tree=TREE.to_json())
    generator, twin = start(drafter, target, seed), NaiveEagle(drafter, view(target, drafter))
    commit(text_for(drafter).more(5), generator, twin)
    return generator.propose(DraftBudget((20,), 64, temperature=0.7, **budget)), twin


@pytest.mark.parametrize("kind", KINDS)
def test_a_drawn_draft_has_a_shape_settled_before_and_says_what_it_was_drawn_from(target: Any, kind: str) -> None:
    draft, twin = drawn(target, kind, 0)
    parents = draft.parents[0].tolist()

    assert parents == TREE.parents[0].tolist()
    assert draft.draft_probs.shape == (1, 4, draft.draft_probs.shape[-1])
    for node in (0, 1, 2, 3):
        path = paths(draft)[node]
        probs = draft.draft_probs[0, draft.dist_index[0, node]]
        torch.testing.assert_close(probs.double(), twin.probs(path, temperature=0.7), atol=1e-5, rtol=1e-4)
        children = [draft.token_ids[0, child].item() for child, parent in enumerate(parents) if parent == node]
        assert len(set(children)) == len(children)
        assert all(probs[child] > 0 for child in children)


def test_what_cannot_be_drafted_has_no_probability_and_is_never_drawn(target: Any) -> None:
    draft, _ = drawn(target, "eagle-3", 0)
    drafter = growing(target, "eagle-3")

    can_be_drafted = drafter.t2d
    assert int(can_be_drafted.sum()) == 40
    assert draft.draft_probs[..., ~can_be_drafted].eq(0).all()
    torch.testing.assert_close(draft.draft_probs.sum(-1), torch.ones(1, 4))
    tokens = torch.cat([drawn(target, "eagle-3", seed)[0].token_ids[0, 1:] for seed in range(10)])
    assert can_be_drafted[tokens].all()


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize("kind", ["eagle-1", "eagle-3"])
def test_children_take_the_noise_that_the_text_will_be_drawn_with(target: Any, kind: str, is_dynamic: bool) -> None:
    noises = torch.empty(10, 97).exponential_(generator=torch.Generator().manual_seed(4))
    drafter = growing(target, kind, draft_tree=TREE.to_json(), dynamic_tree=is_dynamic)
    generator, twin = start(drafter, target), NaiveEagle(drafter, view(target, drafter))
    commit(text_for(drafter).more(5), generator, twin)

    def ratios(path: tuple[int, ...]) -> torch.Tensor:
        found = twin.probs(path, temperature=0.7) / noises[len(path) + 1]
        return found / found.sum()

    draft = generator.propose(DraftBudget((20,), 64, temperature=0.7, noise=lambda row, depth: noises[depth]))

    assert draft.draft_probs is None
    if is_dynamic:
        assert paths(draft) == grown_paths(lambda path, _place: ratios(path).tolist(), 4, 3, 9)
        return
    for node in (0, 1, 2, 3):
        best = ratios(paths(draft)[node]).argsort(descending=True)
        children = [draft.token_ids[0, child].item() for child, parent in enumerate(TREE.parents[0]) if parent == node]
        assert children == best[: len(children)].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_a_chain_passes_through_the_states_that_training_has_there(
    target: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = growing(target, kind)
    text, generator, drafted_states = text_for(drafter), start(drafter, target), []
    attend = drafter.attend
    monkeypatch.setattr(drafter, "attend", lambda *args: drafted_states.append(attend(*args)) or drafted_states[-1])
    for num_new in (4, 1, 3):
        generator.commit(text.more(num_new))
        draft = generator.propose(DraftBudget((100,), 512, is_chain=True))
    drafted_states, num_pairs, features = drafted_states[-4:], text.num_pairs, text.features[:, : text.num_pairs]
    ids = torch.cat([text.ids[0, 1 : num_pairs + 1], draft.token_ids[0, 1:]])
    later = torch.zeros(1, draft.token_ids.shape[1] - 1, features.shape[-1], dtype=features.dtype)

    embeds = target.get_input_embeddings()(ids)[None]
    trained = drafter(embeds, torch.cat([features, later], dim=1), num_steps=4).states

    for step in range(4):
        found = drafted_states[step][0, -1]
        torch.testing.assert_close(found, trained[0, step, num_pairs - 1], atol=1e-5, rtol=1e-5)


def test_a_static_tree_wider_than_the_draft_vocabulary_is_refused(target: Any) -> None:
    tree = DraftTree.from_lists([-1, 0], [-1, 45]).to_json()

    with pytest.raises(OptionError, match="ask for the 46 best tokens of a position, but the drafter knows 40"):
        start(growing(target, "eagle-3", draft_tree=tree), target)
