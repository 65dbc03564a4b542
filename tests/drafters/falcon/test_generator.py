"""Drafting: the fast generator against its naive twin, what it feeds, and what it leaves behind."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters.texts import Text, cut, drafted, merged, paths
from tests.drafters.trees import Lists, random_tree
from tests.pairs import in_turn
from tests.reference import NaiveFalcon, path_to
from tests.tiny import make_drafter, make_target
from transformers_falcon_spec import DraftTree, FalconSpecDrafter, SpeculationConfig
from transformers_falcon_spec.generation.drafting import Committed, DraftBudget
from transformers_falcon_spec.generation.target import Target

WIDTH = 16
AMPLE = DraftBudget((100,), 512)


@pytest.fixture(scope="module")
def target() -> Any:
    model = make_target(hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    return Target(model.double().requires_grad_(False), (-1,))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def small_drafter(target: Target, tree: Lists | None = None, **options: Any) -> FalconSpecDrafter:
    """A float64 drafter whose recurrence and attention both matter."""
    stored = None if tree is None else {"parents": tree[0], "ranks": tree[1]}
    drafter = make_drafter(target.model, draft_tree=stored, **options)
    for weight in drafter.recurrence.parameters():
        weight.normal_(std=WIDTH**-0.5, generator=torch.Generator().manual_seed(2))
    if drafter.config.transition_rank is not None:
        drafter.transition.after.weight.normal_(std=3.0, generator=torch.Generator().manual_seed(3))
    return drafter


def start(drafter: FalconSpecDrafter, target: Target) -> Any:
    return drafter.candidate_generator(target, 1000, torch.Generator().manual_seed(0))


def commit(committed: Committed, generator: Any, twin: NaiveFalcon | None = None) -> None:
    generator.commit(committed)
    if twin is not None:
        (length,), (num_new,) = committed.lengths, committed.num_new
        twin.commit(committed.sequence_ids[0, length - num_new : length].tolist(), committed.features[0])


def record_calls(drafter: FalconSpecDrafter, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Any]]:
    """Positions, mask and cache of every call of `attend`."""
    calls = []
    attend = drafter.attend

    def recorded(rows: Tensor, mask: Tensor, positions: Tensor, block_positions: Tensor, cache: Any = None) -> Tensor:
        calls.append((positions[0], mask[0], cache))
        return attend(rows, mask, positions, block_positions, cache)

    monkeypatch.setattr(drafter, "attend", recorded)
    return calls


BUDGETS = (
    AMPLE,
    DraftBudget((100,), 512, is_chain=True),
    DraftBudget((3,), 512),
    DraftBudget((100,), 7),
    DraftBudget((100,), 512, num_passes=2),
    DraftBudget((5,), 9, num_passes=1),
    DraftBudget((2,), 3, num_passes=1, is_chain=True),
)
ROUNDS = (1, 2, 3, 5, 1, 1, 2, 7, 4, 1)  # new pairs before each proposal


KINDS: dict[str, dict[str, Any]] = {
    "of the paper": {"block_position_embedding": False},
    "with positions": {},
    "of tokens": {"recurrence": "token"},
    "with shortcut": {"shortcut": True},
    "with a transition": {"transition_rank": 5},
    "with a transition from two tokens": {
        "transition_rank": 5,
        "transition_size": 6,
        "transition_tokens": 2,
        "recurrence": "token",
    },
    "with the newest row": {"norm_inputs": True, "shortcut": True, "newest_row": True, "recurrence": "token"},
}


# Each kind in blocks of each size, with one layer and two in turn; as the kinds are odd in number, each size has both.
CASES = [
    pytest.param(*case, num_layers, marks=pytest.mark.families if case[0] == 4 else [])
    for case, num_layers in in_turn(product((1, 2, 3, 4), KINDS), (1, 2))
]


@pytest.mark.parametrize(("block_size", "kind", "num_layers"), CASES)
def test_the_draft_is_that_of_reading_everything_anew(
    target: Target, block_size: int, kind: str, num_layers: int
) -> None:
    tree = random_tree(3 * block_size, 9 + 4 * block_size, seed=block_size)
    drafter = small_drafter(target, tree, block_size=block_size, num_hidden_layers=num_layers, **KINDS[kind])
    text, generator, twin = Text(seed=num_layers), start(drafter, target), NaiveFalcon(drafter, target)

    for number, num_new in enumerate(ROUNDS):
        commit(text.more(num_new), generator, twin)
        budget = BUDGETS[number % len(BUDGETS)]
        draft, expected = generator.propose(budget), twin.propose(*cut(tree, budget, block_size))

        assert (draft is None) == (expected is None) == (text.num_pairs < block_size)
        if draft is not None:
            assert draft.parents[0].tolist() == cut(tree, budget, block_size)[0]
            assert drafted(draft) == expected
            assert draft.token_ids[0, 0] == text.ids[0, text.num_pairs]


GROWN_BUDGETS = (  # and what is left of depth 5, top 4 and 12 nodes under each, with blocks of k
    (AMPLE, lambda _k: (5, 4, 12)),
    (DraftBudget((100,), 512, is_chain=True), lambda _k: (5, 1, 12)),
    (DraftBudget((2,), 512), lambda _k: (2, 4, 12)),
    (DraftBudget((100,), 5), lambda _k: (5, 4, 5)),
    (DraftBudget((100,), 512, num_passes=2), lambda k: (min(5, 2 * k), 4, 12)),
    (DraftBudget((1,), 3, num_passes=1, is_chain=True), lambda _k: (1, 1, 3)),
)


@pytest.mark.parametrize("kind", ["with positions", "of tokens", "with a transition"])
@pytest.mark.parametrize("num_layers", [pytest.param(1, marks=pytest.mark.families), 2])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_grown_tree_is_that_of_reading_everything_anew(
    target: Target, block_size: int, num_layers: int, kind: str
) -> None:
    drafter = small_drafter(target, block_size=block_size, num_hidden_layers=num_layers, **KINDS[kind])
    drafter.generation_config = SpeculationConfig(dynamic_tree=True, tree_depth=5, num_tree_nodes=12)
    text, generator, twin = Text(seed=num_layers), start(drafter, target), NaiveFalcon(drafter, target)

    for number, num_new in enumerate(ROUNDS):
        commit(text.more(num_new), generator, twin)
        budget, limits = GROWN_BUDGETS[number % len(GROWN_BUDGETS)]
        draft, expected = generator.propose(budget), twin.grown(*limits(block_size))

        assert (draft is None) == (expected is None) == (text.num_pairs < block_size)
        if draft is not None:
            assert paths(draft) == expected
            assert draft.num_passes == -(-limits(block_size)[0] // block_size)
            assert generator.text.cache.lengths.tolist() == [[text.num_pairs]]


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_rows_of_a_batch_grow_what_each_would_alone(target: Target, block_size: int) -> None:
    drafter = small_drafter(target, block_size=block_size)
    drafter.generation_config = SpeculationConfig(dynamic_tree=True, tree_depth=5, num_tree_nodes=9, tree_top_k=6)
    texts = [Text(seed) for seed in range(3)]
    together, alone = start(drafter, target), [start(drafter, target) for _ in texts]

    for number, num_new in enumerate([(7, 4, 5), (1, 1, 4), (3, 2, 1), (1, 6, 2)]):
        pieces = [text.more(num) for text, num in zip(texts, num_new, strict=True)]
        together.commit(merged(pieces))
        depths = tuple(100 - 97 * (number % 3 == row) for row in range(3))
        draft = together.propose(DraftBudget(depths, 512))
        for row, generator in enumerate(alone):
            generator.commit(pieces[row])
            assert paths(draft, row) == paths(generator.propose(DraftBudget(depths[row : row + 1], 512)))


def test_the_naive_twin_sees_a_change_of_alignment(target: Target) -> None:
    drafter = small_drafter(target, block_size=2, num_hidden_layers=2)
    twin, committed = NaiveFalcon(drafter, target), Text().more(9)
    twin.commit(committed.sequence_ids[0, 1:10].tolist(), committed.features[0])
    twin.propose([-1], [-1])
    ends_cut_backwards = twin.ends
    outputs = twin.read((), {}, {})

    twin.ends = [1, 1, 3, 3, 5, 5, 7, 7, 8]  # cut from row 0, as in the reference code

    assert ends_cut_backwards == [0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert not torch.allclose(outputs, twin.read((), {}, {}))


@pytest.mark.parametrize(
    ("block_size", "num_accepted", "blocks"),
    [
        (2, 0, [[9, 10]]),
        (2, 1, [[10, 11]]),
        (2, 2, [[10], [11, 12]]),
        (2, 3, [[10, 11], [12, 13]]),
        (2, 6, [[10], [11, 12], [13, 14], [15, 16]]),
        (3, 0, [[8, 9, 10]]),
        (3, 1, [[9, 10, 11]]),
        (3, 2, [[10, 11, 12]]),
        (3, 3, [[10], [11, 12, 13]]),
        (3, 6, [[10], [11, 12, 13], [14, 15, 16]]),
        (1, 0, [[10]]),
        (1, 2, [[10], [11], [12]]),
        (4, 0, [[7, 8, 9, 10]]),
    ],
)
def test_blocks_are_cut_from_the_newest_row_and_old_rows_fill_a_short_one(
    target: Target, block_size: int, num_accepted: int, blocks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = small_drafter(target, block_size=block_size)
    calls = record_calls(drafter, monkeypatch)
    text, generator = Text(), start(drafter, target)
    generator.commit(text.more(10))
    generator.propose(AMPLE)
    calls.clear()

    generator.commit(text.more(num_accepted + 1))
    generator.propose(AMPLE)

    positions, mask, _ = calls[0]
    ends = mask.sum(-1) - 1  # the last row that each one sees, for it sees all before
    found = [positions[ends == end].tolist() for end in ends.unique()]
    assert found == blocks
    assert ends.unique().tolist() == [block[-1] for block in blocks]


@pytest.mark.parametrize(
    ("block_size", "passes"), [(2, [(8, 9), (10, 11), (12, 13), (14, 15)]), (3, [(7, 9), (10, 12)])]
)
def test_each_pass_stands_behind_the_one_before(
    target: Target, block_size: int, passes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parents, ranks = list(range(-1, len(passes) * block_size)), [-1] + [0] * (len(passes) * block_size)
    drafter = small_drafter(target, (parents, ranks), block_size=block_size)
    calls = record_calls(drafter, monkeypatch)
    generator = start(drafter, target)

    generator.commit(Text().more(10))
    generator.propose(AMPLE)

    rows = [positions[-block_size:].tolist() for positions, _, _ in calls]
    assert [(row[0], row[-1]) for row in rows] == passes
    for number, (_, mask, _) in enumerate(calls):  # true rows, the path, the own block: here everything
        assert mask[-block_size:].sum(-1).tolist() == [10 + number * block_size] * block_size


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_all_blocks_of_a_level_are_read_in_one_forward(
    target: Target, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = random_tree(3 * block_size, 40, seed=5)
    drafter = small_drafter(target, tree, block_size=block_size)
    calls = record_calls(drafter, monkeypatch)
    generator = start(drafter, target)
    generator.commit(Text().more(6))

    draft = generator.propose(AMPLE)

    parents = tree[0]
    depths = [len(path_to(parents, node)) - 1 for node in range(len(parents))]
    inner = [depths[node] for node in range(len(parents)) if node in parents]
    num_blocks = [inner.count(level * block_size) for level in (1, 2)]
    assert draft is not None
    assert draft.num_passes == len(calls) == 3
    assert [len(positions) for positions, _, _ in calls] == [6, *(count * block_size for count in num_blocks)]


@pytest.mark.parametrize("block_size", [2, 3, 4])
def test_fewer_rows_than_a_block_draft_nothing_and_are_not_lost(target: Target, block_size: int) -> None:
    drafter = small_drafter(target, block_size=block_size)
    text, generator, twin = Text(), start(drafter, target), NaiveFalcon(drafter, target)
    chain = (list(range(-1, block_size)), [-1] + [0] * block_size)

    for _ in range(block_size - 1):
        commit(text.more(1), generator, twin)
        assert generator.propose(AMPLE) is None
        twin.propose(*chain)
    commit(text.more(1), generator, twin)

    assert drafted(generator.propose(AMPLE)) == twin.propose(*chain)


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_after_a_proposal_the_cache_holds_the_committed_rows_alone(
    target: Target, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = small_drafter(target, random_tree(3 * block_size, 30, seed=1), block_size=block_size)
    calls = record_calls(drafter, monkeypatch)
    text, generator = Text(), start(drafter, target)

    for num_new in ROUNDS:
        generator.commit(text.more(num_new))
        generator.propose(AMPLE)

        cache = calls[-1][2]
        assert cache.lengths.tolist() == [[text.num_pairs]]
        for layer in cache.layers:
            assert layer.held["keys"][:, :, : text.num_pairs].any()
            assert not layer.held["keys"][:, :, text.num_pairs :].any()


@pytest.mark.parametrize("block_size", [2, 3])
def test_several_commits_before_a_proposal_are_as_one(target: Target, block_size: int) -> None:
    drafter = small_drafter(target, block_size=block_size, num_hidden_layers=2)
    drafts = []

    for pieces in ([6, 1, 3], [10]):
        text, generator = Text(), start(drafter, target)
        for num_new in pieces:
            generator.commit(text.more(num_new))
        drafts.append(generator.propose(AMPLE))

    assert drafted(drafts[0]) == drafted(drafts[1])


@pytest.mark.parametrize("recurrence", ["sequence", "token"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_with_one_attention_block_the_draft_depends_on_the_text_alone(
    target: Target, block_size: int, recurrence: str
) -> None:
    tree = random_tree(2 * block_size, 14, seed=3)
    drafter = small_drafter(target, tree, block_size=block_size, recurrence=recurrence)
    text, generator = Text(), start(drafter, target)

    for num_new in ROUNDS:
        generator.commit(text.more(num_new))
        step_by_step = generator.propose(AMPLE)
        fresh_text, fresh = Text(), start(drafter, target)
        fresh.commit(fresh_text.more(text.num_pairs))
        at_once = fresh.propose(AMPLE)

        assert (step_by_step is None) == (at_once is None)
        assert step_by_step is None or drafted(step_by_step) == drafted(at_once)


def test_no_room_means_the_root_alone_and_no_pass_over_the_tree(target: Target) -> None:
    drafter = small_drafter(target, block_size=2)
    text, generator = Text(), start(drafter, target)
    generator.commit(text.more(4))

    draft = generator.propose(DraftBudget((0,), 512))

    assert draft.token_ids.tolist() == [[text.ids[0, 4].item()]]
    assert draft.parents.tolist() == [[-1]]


def test_siblings_differ_and_take_the_rank_they_are_named_for(target: Target) -> None:
    drafter = small_drafter(target, ([-1, 0, 0, 0, 0], [-1, 0, 1, 2, 3]), block_size=2)
    reversed_ranks = small_drafter(target, ([-1, 0, 0, 0, 0], [-1, 3, 2, 1, 0]), block_size=2)

    tokens = []
    for each in (drafter, reversed_ranks):
        generator = start(each, target)
        generator.commit(Text().more(5))
        tokens.append(generator.propose(AMPLE).token_ids[0, 1:].tolist())

    assert len(set(tokens[0])) == 4
    assert tokens[0] == tokens[1][::-1]


def test_drafting_leaves_the_global_random_state_alone(target: Target) -> None:
    drafter = small_drafter(target, random_tree(6, 20, seed=0), block_size=2)
    generator = start(drafter, target)
    before = torch.get_rng_state()

    generator.commit(Text().more(7))
    generator.propose(AMPLE)

    assert torch.equal(before, torch.get_rng_state())


def test_two_generators_of_one_drafter_do_not_disturb_each_other(target: Target) -> None:
    drafter = small_drafter(target, random_tree(6, 20, seed=0), block_size=2)
    texts, generators = [Text(1), Text(2)], [start(drafter, target), start(drafter, target)]
    alone = start(drafter, target)
    for committed in (text := Text(1)).more(5), text.more(2):
        alone.commit(committed)
        expected = alone.propose(AMPLE)

    for num_new in (5, 2):
        for each, generator in zip(texts, generators, strict=True):
            generator.commit(each.more(num_new))
            found = generator.propose(AMPLE) if generator is generators[1] else (first := generator.propose(AMPLE))

    assert drafted(first) == drafted(expected) != drafted(found)
    assert isinstance(drafter.draft_tree, DraftTree)


@pytest.mark.parametrize("recurrence", ["sequence", "token"])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_rows_of_a_batch_draft_what_each_would_alone(target: Target, block_size: int, recurrence: str) -> None:
    tree = random_tree(2 * block_size + 1, 9 + 4 * block_size, seed=block_size)
    drafter = small_drafter(target, tree, block_size=block_size, num_hidden_layers=2, recurrence=recurrence)
    texts = [Text(seed) for seed in range(3)]
    together, alone = start(drafter, target), [start(drafter, target) for _ in texts]
    rounds = [(9, 1, 4), (1, 3, 1), (1, 1, 1), (5, 0, 2), (2, 0, 1), (1, 0, 6), (4, 0, 1), (1, 0, 3), (1, 2, 1)]
    rounds = [(7, 0, 2), *rounds]  # nothing to read of a row whose newest prompt tokens are padding

    for number, num_new in enumerate(rounds):
        pieces = [text.more(num) for text, num in zip(texts, num_new, strict=True)]
        together.commit(merged(pieces))
        depths = tuple(100 - 96 * (number % 3 == row) for row in range(3))
        draft = together.propose(DraftBudget(depths, 512))
        for row, generator in enumerate(alone):
            generator.commit(pieces[row])
            parents = draft.parents[min(row, len(draft.parents) - 1)].tolist()
            nodes = [0] + [node for node, parent in enumerate(parents) if parent >= 0]
            if not num_new[row]:  # nothing to draft from
                assert nodes == [0]
                assert draft.token_ids[row, 0] == pieces[row].sequence_ids[0, pieces[row].lengths[0] - 1]
                continue
            expected = generator.propose(DraftBudget(depths[row : row + 1], 512))
            if expected is None:  # fewer pairs than a block
                assert nodes == [0]
                continue
            shape = [nodes.index(parents[node]) if node else -1 for node in nodes]
            assert shape == expected.parents[0].tolist()
            assert [draft.token_ids[row, node].item() for node in nodes] == expected.token_ids[0].tolist()
