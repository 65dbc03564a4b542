"""Stored texts: the fast look-up against its naive twin, their bounds, whose they are, and texts that stay the target's own."""

import math
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import runs
from tests.drafters.medusa.makers import make_medusa
from tests.tiny import make_drafter, make_prompt, make_target
from transformers_falcon_spec import SpeculationConfig, TextStore, draft_from
from transformers_falcon_spec.drafters.tree_drafting.repeated_text import LONGEST_MATCH, PRIOR, STORE_SIZES, RowText
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.sequence_batch import seeded_rows

NUM_NEW = 48


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def target() -> Any:
    return make_target(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2).double()


def make(target: Any, **options: Any) -> Any:
    """A drafter with a branch of text; untrained, so that next to nothing else of its drafts is accepted."""
    drafter = make_drafter(target, block_size=2)
    drafter.generation_config = SpeculationConfig(**{"prompt_lookup_num_tokens": 6, "tune": False, **options})
    return drafter


def texts_that_return(seed: int, num: int, num_kinds: int = 6) -> list[list[int]]:
    """Texts of few kinds of tokens; some go on where an older one ended, some hold a part of one."""
    rng = random.Random(seed)
    texts: list[list[int]] = []
    for _ in range(num):
        text = [rng.randrange(num_kinds) for _ in range(rng.randint(0, 25))]
        if texts and rng.random() < 0.3:
            text = rng.choice(texts) + text
        elif texts and rng.random() < 0.5:
            old = rng.choice(texts)
            text += old[rng.randint(0, len(old)) :]
        texts.append(text)
    return texts


class NaiveStore:
    """The twin: all texts in a list, every place of which is compared."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.texts: list[list[int]] = []

    def add(self, text: list[int]) -> None:
        text = text[-self.max_tokens :]
        self.texts = [kept for kept in self.texts if text[: len(kept)] != kept] + [text]
        while sum(map(len, self.texts)) > self.max_tokens:
            del self.texts[0]

    def match(self, ids: list[int]) -> tuple[list[int], int, int] | None:
        for size in STORE_SIZES:
            for text in reversed(self.texts):
                for start in range(len(text) - 1, size - 1, -1):
                    if text[start - size : start] == ids[-size:]:
                        same = [
                            length
                            for length in range(1, min(start, len(ids), LONGEST_MATCH) + 1)
                            if text[start - length : start] == ids[-length:]
                        ]
                        return text, start, max(same)
        return None


@pytest.mark.parametrize("max_tokens", [7, 60, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_matches_are_those_of_the_naive_twin(seed: int, max_tokens: int) -> None:
    store, twin, num_found = TextStore(max_tokens), NaiveStore(max_tokens), 0

    for text in texts_that_return(seed, 40):
        store.add(text)
        twin.add(text)
        assert [*store._texts] == twin.texts
        for ids in (text[: len(text) // 2], *texts_that_return(len(text), 6)):
            found = store.index.match(ids)
            assert (found and (found.text, found.start, found.length)) == twin.match(ids)
            num_found += found is not None

    assert num_found > 30


@pytest.mark.parametrize("seed", range(3))
def test_memory_is_bounded_and_nothing_of_a_text_that_left_stays(seed: int) -> None:
    store = TextStore(max_tokens=50)

    for text in texts_that_return(seed, 60):
        store.add(text)
        assert store.num_tokens == sum(map(len, store._texts)) <= 50
        assert len(store.index._places) <= 50 * len(STORE_SIZES)
        kept = {id(each) for each in store._texts}
        assert {id(place[0]) for place in store.index._places.values()} <= kept


def test_a_token_takes_as_much_memory_as_is_said() -> None:
    rng = random.Random(0)
    texts = [[rng.randrange(50_000) for _ in range(500)] for _ in range(60)]
    tracemalloc.start()

    store = TextStore(max_tokens=20_000)
    for text in texts:
        store.add(text)

    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 500 < num_bytes / store.num_tokens < 800


def test_a_text_that_is_too_long_is_kept_from_its_end() -> None:
    store = TextStore(max_tokens=3)

    store.add(torch.arange(10))

    assert [*store._texts] == [[7, 8, 9]]


def test_the_longer_match_is_drafted_and_stored_texts_do_not_go_round() -> None:
    store = TextStore()
    store.add([9, 1, 2, 3, 4, 5])
    row = RowText(2, store)

    row.add([1, 2, 7, 1, 2], is_prompt=True)
    assert row.continuation(9)[0] == [7, 1, 2, 7, 1, 2, 7, 1, 2]  # both match two tokens
    row.add([3], is_prompt=False)
    tokens, log_probs = row.continuation(9)

    assert tokens == [4, 5]
    probs = [PRIOR[2], PRIOR[2] * PRIOR[3]]
    assert [math.exp(value) for value in log_probs] == pytest.approx(probs)


def test_a_store_learns_how_often_its_texts_come_again() -> None:
    store = TextStore()
    store.add(range(100))
    before = store.index.log_prob(LONGEST_MATCH)

    RowText(2, store).add(range(60), is_prompt=False)
    assert store.index.log_prob(LONGEST_MATCH) > before
    assert TextStore().index.log_prob(LONGEST_MATCH) == before


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("call", [{}, {"do_sample": True, "temperature": 0.8}, runs.SAMPLING])
def test_the_text_is_the_targets_own(call: dict[str, Any], capture: bool, target: Any) -> None:
    prompt, drafter = make_prompt(9), make(target, capture=capture)
    call = {"max_new_tokens": NUM_NEW, **call}
    plain = runs.plain(target, prompt, seed=5, **call).sequences
    without = runs.both(target, drafter, prompt, **call)
    store = TextStore()
    store.add(plain[0])  # of another seed, where tokens are drawn
    store.add(runs.plain(target, prompt, **call).sequences[0])

    with draft_from([store]):
        pair = runs.both(target, drafter, prompt, **call)

    pair.assert_equal()
    assert pair.stats.num_steps < without.stats.num_steps
    assert pair.stats.num_steps <= NUM_NEW / 4


@pytest.mark.parametrize("call", [{}, runs.SAMPLING])
def test_the_text_is_the_targets_own_where_the_tuner_chooses_how_much_is_drafted(
    call: dict[str, Any], target: Any
) -> None:
    prompt, drafter = make_prompt(9), make(target, tune=True)
    call = {"max_new_tokens": NUM_NEW, **call}
    store = TextStore()
    store.add(runs.plain(target, prompt, **call).sequences[0])

    with draft_from([store]):
        pair = runs.both(target, drafter, prompt, **call)

    pair.assert_equal()
    assert pair.stats.acceptance_length > 1


def test_rows_draft_from_their_own_stores_alone(target: Any) -> None:
    prompts = torch.cat([make_prompt(9, seed=seed) for seed in range(3)])
    call = {"max_new_tokens": NUM_NEW, "do_sample": True, "temperature": 0.8}
    drafter = make(target)
    texts = [runs.plain(target, prompts[row : row + 1], row, **call).sequences[0] for row in range(3)]
    stores = [TextStore(), TextStore()]
    for store, text in zip(stores, texts, strict=False):
        store.add(text)

    def num_steps(rows: list[TextStore | None]) -> list[int]:
        with draft_from(rows), seeded_rows(range(3)):
            output = runs.drafted(target, drafter, prompts, **call)
        assert output.sequences.tolist() == torch.stack(texts).tolist()
        return [row.num_steps for row in output.speculation.rows]

    without = num_steps([None, None, None])
    first, second, third = num_steps([stores[0], stores[1], None])
    assert max(first, second) <= NUM_NEW / 4
    assert third == without[2]
    assert min(num_steps([stores[1], stores[0], None])) > NUM_NEW / 2


def test_a_store_is_read_by_the_calls_inside_alone(target: Any) -> None:
    prompt, drafter, store = make_prompt(9), make(target), TextStore()
    before = runs.both(target, drafter, prompt, max_new_tokens=NUM_NEW)
    store.add(before.plain.sequences[0])

    with draft_from([store]):
        pass
    after = runs.both(target, drafter, prompt, max_new_tokens=NUM_NEW)

    assert after.stats.num_steps == before.stats.num_steps
    assert store.num_tokens == before.plain.sequences.shape[1]  # no call adds anything


def test_a_store_for_another_number_of_rows_is_refused(target: Any) -> None:
    with draft_from([TextStore(), None]), pytest.raises(OptionError, match="the call has 1 rows and it has 2"):
        runs.drafted(target, make(target))


@pytest.mark.parametrize("kind", ["falcon", "medusa"])
def test_a_drafter_without_the_branch_is_refused(kind: str, target: Any) -> None:
    drafter = make_drafter(target) if kind == "falcon" else make_medusa(target)

    with draft_from([TextStore()]), pytest.raises(OptionError, match="drafted as a branch of repeated text"):
        runs.drafted(target, drafter)


def test_a_store_without_room_is_refused() -> None:
    with pytest.raises(OptionError, match="must be at least 1"):
        TextStore(0)
