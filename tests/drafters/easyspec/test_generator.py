"""Drafting: the generator against a naive twin without a cache, exact reading against the stock model, batches, draws."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.easyspec.kinds import GROUPS, KINDS, make_drafter, make_model, view
from tests.drafters.easyspec.twin import IN_ORDER
from tests.drafters.texts import Text, assert_rows_draft_alone, cut, drafted, merged, paths
from tests.drafters.trees import random_tree
from tests.growing import grown_paths
from tests.reference_easyspec import NaiveLayerParallel
from tests.tiny import VOCAB_SIZE
from transformers_falcon_spec import Draft, DraftTree, LayerParallelConfig, LayerParallelDrafter, SpeculationConfig
from transformers_falcon_spec.generation.drafting import DraftBudget

AMPLE = DraftBudget((100,), 512)
ROUNDS = (3, 1, 4, 2, 1)  # new tokens before each proposal; at first one more
GROWN = {"num_tree_nodes": 7, "tree_top_k": 2, "tree_depth": 4}
GROWN_BUDGETS = (  # and what is left of depth 4, top 2 and 7 nodes under each
    (AMPLE, (4, 2, 7)),
    (DraftBudget((100,), 512, is_chain=True), (4, 1, 7)),
    (DraftBudget((2,), 512), (2, 2, 7)),
    (DraftBudget((100,), 5), (4, 2, 5)),
    (DraftBudget((100,), 512, num_passes=3), (3, 2, 7)),
)
STATIC_BUDGETS = (AMPLE, DraftBudget((100,), 512, is_chain=True), DraftBudget((3,), 5))
BACKENDS = (IN_ORDER, "fused")
FAMILIES = [kind if kind in ("llama", "qwen3") else pytest.param(kind, marks=pytest.mark.families) for kind in KINDS]


@pytest.fixture(scope="module")
def target() -> Any:
    return make_model("llama")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def start(drafter: LayerParallelDrafter, target: Any, seed: int = 0) -> Any:
    return drafter.candidate_generator(view(target), 1000, torch.Generator().manual_seed(seed))


def twin_of(drafter: LayerParallelDrafter) -> NaiveLayerParallel:
    return NaiveLayerParallel(drafter.model, drafter.config.layer_groups, drafter.config.draft_vocab_size)


class Twins:
    """A generator and its naive twin, which read the same text."""

    def __init__(self, drafter: LayerParallelDrafter, target: Any, seed: int = 0) -> None:
        self.text, self.generator, self.twin = Text(seed), start(drafter, target, seed), twin_of(drafter)

    def more(self, num_new: int) -> None:
        known = self.text.num_pairs + 1 if self.text.num_pairs else 0
        committed = self.text.more(num_new)
        self.generator.commit(committed)
        self.twin.commit(committed.sequence_ids[0, known : committed.lengths[0]].tolist())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_grown_tree_is_that_of_reading_everything_anew(target: Any, kind: str, backend: str) -> None:
    twins = Twins(make_drafter(target, kind, backend, **GROWN), target)

    # the twin reads everything anew for every question: one family draws on every budget, the others on the first two
    for number, num_new in enumerate(ROUNDS if (kind, backend) == ("llama", "fused") else ROUNDS[:2]):
        twins.more(num_new)
        budget, limits = GROWN_BUDGETS[number]
        draft = twins.generator.propose(budget)

        assert paths(draft) == twins.twin.grown(*limits)
        assert draft.token_ids[0, 0] == twins.twin.text[-1]
        assert draft.num_passes == limits[0]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_static_tree_is_that_of_reading_everything_anew(target: Any, kind: str) -> None:
    tree = random_tree(4, 8, seed=3)
    twins = Twins(
        make_drafter(target, kind, draft_tree={"parents": tree[0], "ranks": tree[1]}, dynamic_tree=False), target
    )

    for num_new, budget in zip(ROUNDS, STATIC_BUDGETS, strict=False):
        twins.more(num_new)
        draft, expected = twins.generator.propose(budget), cut(tree, budget, 1)

        assert draft.parents[0].tolist() == expected[0]
        assert drafted(draft) == twins.twin.static(*expected)


@torch.no_grad()
def test_what_is_drafted_depends_on_the_groups(target: Any) -> None:
    ids = torch.arange(3, 12)[None]
    one_by_one = [[number] for number in range(7)]
    of_groups = make_drafter(target, layer_groups=GROUPS)
    alone = make_drafter(target, layer_groups=one_by_one)

    torch.testing.assert_close(of_groups(ids, is_exact=True), alone(ids, is_exact=True))
    assert not torch.allclose(of_groups(ids), alone(ids), atol=1e-3)


def states_of(generator: Any, groups: list[list[int]]) -> list[list[tuple[Tensor, Tensor]]]:
    """For each row and layer the keys and values `[heads, tokens, size]` of what the cache holds, in order."""
    layers = generator.text.cache.layers
    split: list[tuple[Tensor, Tensor]] = []
    for number, group in enumerate(groups):
        split += zip(*(layers[number].held[name].chunk(len(group), 1) for name in ("keys", "values")), strict=True)
    found = []
    for row, num in enumerate(generator.text.num_read):
        found.append([(keys[row][:, :num], values[row][:, :num]) for keys, values in split])
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2"])
def test_after_every_step_the_cache_is_that_of_a_fresh_exact_reading(target: Any, kind: str, backend: str) -> None:
    drafter = make_drafter(target, kind, backend, **GROWN)
    texts, generator = [Text(seed) for seed in range(2)], start(drafter, target)

    for num_new in ((3, 2), (1, 4), (4, 1), (1, 0), (2, 0), (5, 0)):
        generator.commit(merged([text.more(num) for text, num in zip(texts, num_new, strict=True)]))
        generator.propose(DraftBudget((100, 100), 512))

        for text, found in zip(texts, states_of(generator, GROUPS), strict=True):
            fresh = drafter.model(text.ids[:, : text.num_pairs + 1], use_cache=True).past_key_values
            for layer, (keys, values) in zip(fresh.layers, found, strict=True):
                num_held = layer.keys.shape[-2]  # a layer with a window keeps the newest alone
                assert keys.shape[-2] == text.num_pairs + 1
                torch.testing.assert_close(keys[:, -num_held:], layer.keys[0], atol=1e-9, rtol=1e-9)
                torch.testing.assert_close(values[:, -num_held:], layer.values[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_dynamic", [True, False])
def test_rows_of_a_batch_draft_what_each_would_alone(target: Any, is_dynamic: bool, backend: str) -> None:
    tree = random_tree(4, 9, seed=3)
    options = {"dynamic_tree": is_dynamic, "draft_tree": {"parents": tree[0], "ranks": tree[1]}}
    drafter = make_drafter(target, "qwen2", backend, **GROWN, **options)
    texts = [Text(seed) for seed in range(3)]
    together, alone = start(drafter, target), [start(drafter, target) for _ in texts]
    rounds = [(7, 1, 2), (9, 1, 4), (1, 3, 1), (5, 0, 2), (1, 0, 6), (0, 9, 1), (8, 0, 0), (0, 0, 9), (9, 1, 0)]

    assert_rows_draft_alone(together, alone, texts, rounds)

    assert together.text.num_read == [sum(num) + 1 for num in zip(*rounds, strict=True)]


def test_several_commits_before_a_proposal_are_as_one_and_no_room_means_no_draft(target: Any) -> None:
    found = []

    for pieces in ([6, 1, 3], [10]):
        twins = Twins(make_drafter(target, **GROWN), target)
        for num_new in pieces:
            twins.more(num_new)
        found.append(paths(twins.generator.propose(AMPLE)))
    twins.more(1)

    assert found[0] == found[1]
    assert twins.generator.propose(DraftBudget((0,), 512)) is None


def test_drafting_leaves_the_global_random_state_alone(target: Any) -> None:
    twins, before = Twins(make_drafter(target, **GROWN), target), torch.get_rng_state()

    twins.more(7)
    twins.generator.propose(DraftBudget((100,), 512, temperature=0.7))

    assert before.equal(torch.get_rng_state())


TREE = DraftTree.from_lists([-1, 0, 0, 1, 1, 2, 3])


def drawn(target: Any, kind: str, backend: str, seed: int = 0, **options: Any) -> tuple[Draft, NaiveLayerParallel]:
    """A drawn draft, from a drafter whose tree would grow, and a twin that has read the same."""
    twins = Twins(make_drafter(target, kind, backend, draft_tree=TREE.to_json(), **GROWN, **options), target, seed)
    twins.more(5)
    return twins.generator.propose(DraftBudget((20,), 64, temperature=0.7)), twins.twin


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_drawn_draft_says_the_rough_distributions_that_it_was_drawn_from(
    target: Any, kind: str, backend: str
) -> None:
    draft, twin = drawn(target, kind, backend)
    parents = draft.parents[0].tolist()

    assert parents == TREE.parents[0].tolist()
    assert draft.draft_probs.shape == (1, 4, VOCAB_SIZE)
    for node in (0, 1, 2, 3):
        probs = draft.draft_probs[0, draft.dist_index[0, node]]
        torch.testing.assert_close(probs.double(), twin.probs(paths(draft)[node], 0.7), atol=1e-5, rtol=1e-4)
        children = [draft.token_ids[0, child].item() for child, parent in enumerate(parents) if parent == node]
        assert len(set(children)) == len(children)
        assert all(probs[child] > 0 for child in children)


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_children_take_the_noise_that_the_text_will_be_drawn_with(target: Any, is_dynamic: bool) -> None:
    noises = torch.empty(10, VOCAB_SIZE).exponential_(generator=torch.Generator().manual_seed(4))
    drafter = make_drafter(target, draft_tree=TREE.to_json(), dynamic_tree=is_dynamic, draft_vocab_size=90, **GROWN)
    twins = Twins(drafter, target)
    twins.more(5)

    def ratios(path: tuple[int, ...]) -> Tensor:
        found = twins.twin.probs(path, temperature=0.7) / noises[len(path) + 1, :90]
        return found / found.sum()

    draft = twins.generator.propose(DraftBudget((20,), 64, temperature=0.7, noise=lambda row, depth: noises[depth]))

    assert draft.draft_probs is None
    if is_dynamic:
        assert paths(draft) == grown_paths(lambda path, _place: ratios(path).tolist(), 4, 2, 7)
        return
    for node in (0, 1, 2, 3):
        best = ratios(paths(draft)[node]).argsort(descending=True)
        children = [draft.token_ids[0, child].item() for child, parent in enumerate(TREE.parents[0]) if parent == node]
        assert children == best[: len(children)].tolist()


@pytest.mark.parametrize("own_size", [60, 130])
def test_only_shared_tokens_are_drafted_and_others_are_read(target: Any, own_size: int) -> None:
    model, num_shared = make_model("llama", seed=1, vocab_size=own_size), 40
    sizes = {"vocab_size": VOCAB_SIZE, "draft_vocab_size": num_shared, "layer_groups": GROUPS}
    config = LayerParallelConfig(draft_config=model.config, attn_implementation="sdpa", **sizes)
    drafter = LayerParallelDrafter(config, model)
    drafter.generation_config = SpeculationConfig(draft_tree=None, dynamic_tree=True, **GROWN)
    twins = Twins(drafter, target)

    for num_new in (9, 2):  # tokens up to 96, some of which a model of 60 lacks
        twins.more(num_new)
        draft = twins.generator.propose(AMPLE)

        assert paths(draft) == twins.twin.grown(4, 2, 7)
        assert draft.token_ids[0, 1:].max() < num_shared
    twins.more(1)
    draft = twins.generator.propose(DraftBudget((20,), 64, temperature=0.7))
    assert draft.draft_probs.shape[-1] == VOCAB_SIZE
    assert draft.draft_probs[..., num_shared:].eq(0).all()
    torch.testing.assert_close(draft.draft_probs.sum(-1), torch.ones(draft.draft_probs.shape[:2]))


def test_beyond_the_draft_models_context_nothing_is_drafted(target: Any) -> None:
    twins = Twins(make_drafter(target, changes={"max_position_embeddings": 12}, **GROWN), target)

    twins.more(8)  # 9 tokens, so that there is room for 3
    assert paths(twins.generator.propose(AMPLE)) == twins.twin.grown(3, 2, 7)
    twins.more(2)  # 11
    assert paths(twins.generator.propose(AMPLE)) == twins.twin.grown(1, 2, 7)

    for num_new in (1, 5):  # 12 and 17
        twins.more(num_new)
        assert twins.generator.propose(AMPLE) is None
