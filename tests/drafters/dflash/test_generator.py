"""Drafting with DFlash: the generator with its cache against one whole forward of the stock model, row by row."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.drafters.dflash.makers import make_dflash_drafter
from tests.drafters.texts import Text, assert_rows_draft_alone, cut, drafted, merged, paths
from tests.drafters.trees import Lists, random_tree
from tests.reference import path_to
from tests.tiny import make_target
from transformers_falcon_spec import DFlashDrafter
from transformers_falcon_spec.generation.drafting import DraftBudget
from transformers_falcon_spec.generation.target import Target

WIDTH = 16
SLOTS = 4
AMPLE = DraftBudget((100,), 512)
TREE = random_tree(SLOTS, 20, seed=3)
ROUNDS = (6, 1, 3, 12, 2, 1)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
KINDS: dict[str, dict[str, Any]] = {"full": {}, "sliding": SLIDING}


@pytest.fixture(scope="module")
def target() -> Target:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = make_target(num_hidden_layers=4, **sizes).double().requires_grad_(False)
    return Target(model, (1, 2))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make(target: Target, kind: str = "full", tree: Lists | None = TREE, **options: Any) -> DFlashDrafter:
    static = {} if tree is None else {"draft_tree": {"parents": tree[0], "ranks": tree[1]}}
    drafter = make_dflash_drafter(target.model, {**static, **options}, block_size=SLOTS + 1)
    for name, value in KINDS[kind].items():
        setattr(drafter.config, name, value)
    return drafter


def start(drafter: DFlashDrafter, target: Target) -> Any:
    return drafter.candidate_generator(target, 1000, torch.Generator().manual_seed(0))


def naive_logits(drafter: DFlashDrafter, target: Target, text: Text) -> torch.Tensor:
    """The logits `[slots, vocab]` of a block behind all features of a text, in one forward and without a cache."""
    block = torch.full((1, SLOTS + 1), drafter.config.mask_token_id)
    block[0, 0] = text.ids[0, text.num_pairs]
    positions = torch.arange(text.num_pairs + SLOTS + 1)
    distance = (positions - positions[-SLOTS - 1 :, None]).abs()
    masks = {"full_attention": distance >= 0, "sliding_attention": distance <= drafter.config.sliding_window}
    states = drafter(
        noise_embeds=target.model.get_input_embeddings()(block),
        context_hidden_states=text.features[:, : text.num_pairs],
        attention_mask={name: torch.where(mask, 0.0, -1e30)[None, None].double() for name, mask in masks.items()},
        position_ids=positions[None],
    ).last_hidden_state
    return target.model.lm_head(states)[0, 1:]


def expected(logits: torch.Tensor, tree: Lists) -> list[int]:
    """The token of every node but the root: of its slot, the one of its rank."""
    depths = [len(path_to(tree[0], node)) - 1 for node in range(len(tree[0]))]
    return [
        int(logits[depth - 1].argsort(descending=True)[rank]) for depth, rank in zip(depths, tree[1], strict=True)
    ][1:]


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_takes_its_rank_from_the_slot_of_its_depth(target: Target, kind: str) -> None:
    drafter, text = make(target, kind), Text(width=2 * WIDTH)
    generator = start(drafter, target)

    for num_new in ROUNDS:
        generator.commit(text.more(num_new))
        draft = generator.propose(AMPLE)

        assert draft.parents[0].tolist() == TREE[0]
        assert draft.token_ids[0, 0] == text.ids[0, text.num_pairs]
        assert draft.token_ids[0, 1:].tolist() == expected(naive_logits(drafter, target, text), TREE)
        assert draft.num_passes == 1


def likeliest_paths(logits: torch.Tensor, num: int) -> set[tuple[int, ...]]:
    """Of all paths that a tree can hold, those of the largest product of probabilities; the root is ()."""
    best = logits.log_softmax(-1).topk(num)
    lists = [list(zip(*each, strict=True)) for each in zip(best.values.tolist(), best.indices.tolist(), strict=True)]
    found = [path for depth in range(SLOTS + 1) for path in itertools.product(*lists[:depth])]
    found.sort(key=lambda path: -sum(score for score, _ in path))
    return {tuple(token for _, token in path) for path in found[:num]}


def test_a_grown_tree_has_the_likeliest_paths_of_independent_slots(target: Target) -> None:
    drafter, text = make(target, tree=None, num_tree_nodes=9, tree_top_k=9), Text(width=2 * WIDTH)
    generator = start(drafter, target)

    for num_new in ROUNDS:
        generator.commit(text.more(num_new))
        draft = generator.propose(AMPLE)

        assert set(paths(draft)) == likeliest_paths(naive_logits(drafter, target, text), 9)


def test_what_was_drafted_is_forgotten_and_the_cache_holds_features_alone(target: Target) -> None:
    drafter, text = make(target), Text(width=2 * WIDTH)
    generator = start(drafter, target)

    for num_new in ROUNDS:
        generator.commit(text.more(num_new))
        generator.propose(AMPLE)

        assert generator.text.cache.lengths.tolist() == [[text.num_pairs]]
        for layer in generator.text.cache.layers:
            assert layer.held["keys"][:, :, : text.num_pairs].any()
            assert not layer.held["keys"][:, :, text.num_pairs :].any()


@pytest.mark.parametrize("num_pauses", [1, 3])
def test_steps_without_a_draft_change_nothing(target: Target, num_pauses: int) -> None:
    drafter, text = make(target), Text(width=2 * WIDTH)
    generator = start(drafter, target)

    for number, num_new in enumerate(ROUNDS):
        generator.commit(text.more(num_new))
        if number % (num_pauses + 1) == num_pauses:
            found = generator.propose(AMPLE).token_ids[0, 1:].tolist()
            assert found == expected(naive_logits(drafter, target, text), TREE)


@pytest.mark.parametrize(
    "budget",
    [
        DraftBudget((2,), 512),
        DraftBudget((100,), 7),
        DraftBudget((3,), 6, is_chain=True),
        DraftBudget((100,), 512, is_chain=True),
    ],
)
def test_a_draft_is_the_part_of_the_tree_within_the_budget(target: Target, budget: DraftBudget) -> None:
    drafter, text = make(target), Text(width=2 * WIDTH)
    generator = start(drafter, target)
    generator.commit(text.more(5))

    draft = generator.propose(budget)

    tree = cut(TREE, budget, SLOTS)
    assert draft.parents[0].tolist() == tree[0]
    assert list(drafted(draft).values()) == expected(naive_logits(drafter, target, text), tree)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", [TREE, None], ids=["static", "grown"])
def test_rows_of_different_lengths_draft_as_each_alone(target: Target, kind: str, tree: Lists | None) -> None:
    drafter, texts = make(target, kind, tree), [Text(row, 2 * WIDTH) for row in range(3)]

    together, *alone = (start(drafter, target) for _ in range(4))

    assert_rows_draft_alone(together, alone, texts, [(9, 2, 5), (1, 3, 1), (0, 4, 2), (2, 1, 1), (1, 0, 7)])


def test_rows_that_are_selected_go_on(target: Target) -> None:
    drafter, texts = make(target), [Text(row, 2 * WIDTH) for row in range(3)]
    generator = start(drafter, target)
    generator.commit(merged([text.more(num) for text, num in zip(texts, (9, 2, 5), strict=True)]))
    generator.propose(DraftBudget((9, 9, 9), 512))

    generator.select_rows([2, 0])
    generator.commit(merged([texts[2].more(1), texts[0].more(3)]))
    draft = generator.propose(DraftBudget((9, 9), 512))

    for row, text in enumerate((texts[2], texts[0])):
        assert draft.token_ids[row, 1:].tolist() == expected(naive_logits(drafter, target, text), TREE)


def test_noise_that_is_foreseen_chooses_the_tokens(target: Target) -> None:
    drafter, text = make(target), Text(width=2 * WIDTH)
    generator = start(drafter, target)
    noises = torch.empty(SLOTS + 1, target.vocab_size).exponential_(generator=torch.Generator().manual_seed(4))
    generator.commit(text.more(7))

    draft = generator.propose(DraftBudget((100,), 512, temperature=0.7, noise=lambda _row, depth: noises[depth]))

    scores = naive_logits(drafter, target, text) - 0.7 * noises[1:].double().log()
    siblings = [TREE[0][:node].count(parent) for node, parent in enumerate(TREE[0])]
    assert draft.draft_probs is None
    assert draft.token_ids[0, 1:].tolist() == expected(scores, (TREE[0], siblings))


def test_without_any_feature_a_plain_step_is_asked_for(target: Target) -> None:
    generator = start(make(target), target)
    generator.commit(Text(width=2 * WIDTH).more(0))

    assert generator.propose(AMPLE) is None
