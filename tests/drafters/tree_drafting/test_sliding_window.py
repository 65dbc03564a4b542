"""Drafters with a sliding window: what they draft, what they keep, and that both are alike however they draft."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.drafters.eagle.naive import NaiveEagle
from tests.drafters.medusa.makers import make_medusa
from tests.drafters.texts import Text, assert_rows_draft_alone, cut, drafted, paths
from tests.drafters.tree_drafting.twins import Twins, assert_same, make_pair
from tests.reference import NaiveFalcon
from tests.tape import install
from tests.tiny import make_target
from transformers_falcon_spec import EagleConfig, EagleDrafter, SpeculationConfig
from transformers_falcon_spec.drafters.tree_drafting.text import MULTIPLE
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.drafting import DraftBudget
from transformers_falcon_spec.generation.slot_cache import SPARE_SLOTS
from transformers_falcon_spec.generation.target import Target

WINDOW = 7
AMPLE = DraftBudget((100,), 512)
ROUNDS = (40, 1, 2, 3, 30, 2, 1, 5)  # new pairs before each proposal
FEW = ("falcon-3 two layers, static", "eagle-3, grown")
OTHERS = (
    "falcon-2 of the paper, static",
    "falcon-2 of tokens, grown",
    "falcon-1 with a transition, grown",
    "eagle-1, static",
)
KINDS = [*FEW, *(pytest.param(name, marks=[pytest.mark.families, pytest.mark.slow]) for name in OTHERS)]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def windowed(name: str, window: int | None = WINDOW) -> tuple[Any, Any]:
    """A target, and a drafter with a window."""
    target, drafter = make_pair(name)
    drafter.config.sliding_window = window
    return target, drafter


def without_window(drafter: Any) -> Any:
    """The same weights."""
    other = copy.copy(drafter)
    other.config = copy.copy(drafter.config)
    other.config.sliding_window = None
    return other


def start(drafter: Any, target: Any) -> Any:
    view = Target(target, drafter.feature_layers)
    return drafter.candidate_generator(view, 1000, torch.Generator().manual_seed(0))


def text_for(drafter: Any, seed: int = 0) -> Text:
    return Text(seed, drafter.config.feature_size)


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", KINDS)
def test_drafts_are_those_of_reading_everything_anew_through_the_window(name: str, window: int) -> None:
    target, drafter = windowed(name, window)
    tree, view, budget = drafter.draft_tree, Target(target, drafter.feature_layers), DraftBudget((3,), 6)
    text, generator = text_for(drafter), start(drafter, target)
    twin: Any = (NaiveFalcon if name.startswith("falcon") else NaiveEagle)(drafter, view)

    for num_new in (12, 1, 2, 4, 1, 11, 1, 2):
        committed = text.more(num_new)
        generator.commit(committed)
        twin.commit(text.ids[0, text.num_pairs - num_new + 1 : text.num_pairs + 1].tolist(), committed.features[0])
        draft = generator.propose(budget)

        if drafter.is_tree_dynamic:
            assert paths(draft) == twin.grown(3, 4, 6)
        else:
            whole = cut((tree.parents[0].tolist(), tree.ranks[0].tolist()), budget, drafter.block_size)
            assert drafted(draft) == (twin.propose if name.startswith("falcon") else twin.static)(*whole)


@pytest.mark.parametrize("name", KINDS)
def test_a_window_as_long_as_the_text_changes_nothing(name: str) -> None:
    target, drafter = windowed(name, sum(ROUNDS) + 8)  # the drafted tokens have positions, too
    other = without_window(drafter)
    text, wide, full = text_for(drafter), start(drafter, target), start(other, target)

    for num_new in ROUNDS:
        committed = text.more(num_new)
        wide.commit(committed)
        full.commit(committed)
        assert paths(wide.propose(AMPLE)) == paths(full.propose(AMPLE))
        assert wide.text.cache.lengths.tolist() == full.text.cache.lengths.tolist() == [[text.num_pairs]]


@pytest.mark.parametrize("name", KINDS)
def test_a_short_window_is_seen_in_drafts_and_in_memory(name: str) -> None:
    target, drafter = windowed(name)
    other = without_window(drafter)
    text, narrow, full = text_for(drafter), start(drafter, target), start(other, target)
    num_other, most = 0, WINDOW + narrow.reach + MULTIPLE

    for num_new in (60, *[2] * 16):
        committed = text.more(num_new)
        narrow.commit(committed)
        full.commit(committed)
        num_other += paths(narrow.propose(AMPLE)) != paths(full.propose(AMPLE))
        held = narrow.text.cache.layers[0].held["keys"]
        num_others = narrow.num_draft_slots + MULTIPLE + SPARE_SLOTS
        assert held.untyped_storage().nbytes() <= (most + num_others) * held[:, :, 0].nbytes

    assert num_other > 5
    assert full.text.cache.lengths.tolist() == [[text.num_pairs]] == [[92]]


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_batch_draft_what_each_would_alone(name: str) -> None:
    target, drafter = windowed(name)
    texts = [text_for(drafter, seed) for seed in range(3)]
    together, alone = start(drafter, target), [start(drafter, target) for _ in texts]
    rounds = [(7, 30, 12), (9, 1, 4), (1, 3, 1), (5, 0, 2), (1, 0, 6), (4, 0, 40), (1, 2, 1), (30, 9, 1), (8, 0, 0)]
    rounds += [(0, 0, 9), (9, 1, 0), (1, 2, 3), (3, 1, 1)]

    assert_rows_draft_alone(together, alone, texts, rounds)

    assert together.text.num_slots <= WINDOW + together.reach + MULTIPLE


@pytest.mark.parametrize("name", FEW)
def test_rows_that_stay_when_others_leave_draft_what_they_would_alone(name: str) -> None:
    target, drafter = windowed(name)
    texts = [text_for(drafter, seed) for seed in range(3)]
    together, alone = start(drafter, target), [start(drafter, target) for _ in texts]
    assert_rows_draft_alone(together, alone, texts, [(40, 9, 3), (1, 4, 2), (5, 1, 30), (2, 3, 1)])

    together.select_rows([0, 2])
    rounds = [(1, 6), (3, 3), (0, 5), (2, 1), (30, 4), (1, 2)]
    assert_rows_draft_alone(together, [alone[0], alone[2]], [texts[0], texts[2]], rounds)

    assert together.text.num_slots <= WINDOW + together.reach + MULTIPLE


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("most_first", [pytest.param(20, marks=pytest.mark.slow), 120])
def test_drafts_in_fixed_shapes_are_the_same_in_a_ring_of_slots(name: str, most_first: int) -> None:
    twins = Twins(name, 2, pair=windowed(name), num_slots=16, most_first=most_first)

    assert_same(*twins.drafts((100, 100)), 2)

    for number, num_new in enumerate([(1, 6), (6, 0), (2, 7), (7, 3)] * 4):
        twins.give(num_new, is_kept=number % 3 != 1)
        assert_same(*twins.drafts([100 * (num > 0) for num in num_new]), 2)

    buffers = twins.buffers
    assert max(twins.fixed.text.num_read) > buffers.num_ring_slots - buffers.most_waiting
    assert buffers.num_ring_slots <= WINDOW + buffers.most_waiting + 8
    assert (
        buffers.cache.layers[0].held["keys"].shape[2]
        <= buffers.num_ring_slots + 1 + twins.fixed.num_draft_slots + MULTIPLE
    )


@pytest.mark.parametrize("name", FEW)
def test_a_ring_that_is_replayed_forgets_nothing_in_pauses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    twins = Twins(name, 2, seed=3, pair=windowed(name), num_slots=16)
    assert_same(*twins.drafts((100, 100)), 2)

    for step in range(26):
        twins.give((6, step % 3), is_kept=step % 5 > 0)
        if step % 9 == 8:
            assert_same(*twins.drafts((100, 100)), 2)
            assert max(twins.fixed.text.num_read) > 6 * step


def test_buffers_of_another_window_are_left_alone() -> None:
    name = FEW[1]
    target, drafter = windowed(name)
    first = Twins(name, 1, pair=(target, drafter))
    drafter.generation_config.sliding_window = 2 * WINDOW

    second = Twins(name, 1, buffers=first.buffers, pair=(target, drafter))

    assert second.buffers is not first.buffers
    assert second.buffers.kind.window == 2 * WINDOW


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("name", ["falcon-2 of tokens, grown", "eagle-1, static"])
def test_texts_beyond_the_window_are_the_targets_own(name: str, capture: bool) -> None:
    target, drafter = windowed(name)
    drafter.generation_config.capture, drafter.generation_config.tune = capture, False
    prompts = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 0, *[1] * 9], [1] * 12])
    asked = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}

    plain = target.generate(prompts, **asked)
    drafted = target.generate(prompts, assistant_model=drafter, **asked)

    assert drafted.sequences.equal(plain.sequences)
    assert drafted.speculation.num_drafted > 0


def test_the_window_is_saved_and_options_go_before_it(tmp_path: Any) -> None:
    config = EagleConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2, vocab_size=50, sliding_window=9)
    drafter = EagleDrafter(config)
    assert drafter.sliding_window == 9
    assert "sliding_window" not in drafter.draft_settings
    drafter.generation_config = SpeculationConfig(sliding_window=4)
    drafter.save_pretrained(tmp_path)

    loaded = EagleDrafter.from_pretrained(tmp_path)

    assert (loaded.config.sliding_window, loaded.sliding_window) == (9, 4)
    assert loaded.draft_settings["sliding_window"] == 4


def test_a_window_that_cannot_be_is_refused() -> None:
    with pytest.raises(OptionError, match="`sliding_window` must be at least 1, but it is 0"):
        SpeculationConfig(sliding_window=0)
    with pytest.raises(OptionError, match="`sliding_window` must be at least 1, but it is -3"):
        EagleConfig(hidden_size=16, num_attention_heads=2, sliding_window=-3)


def test_a_drafter_without_a_window_refuses_one() -> None:
    target = make_target()
    medusa = make_medusa(target)
    medusa.generation_config = SpeculationConfig(sliding_window=8)

    with pytest.raises(OptionError, match="`MedusaDrafter` has no window of its own"):
        medusa.check_target(target)
