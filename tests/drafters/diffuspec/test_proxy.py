"""The proxy: against its formula, as a distribution, in a context, and on disk."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.diffuspec.naive import WittenBell
from transformers_falcon_spec.drafters.diffuspec.search import ContextProxy, NgramProxy
from transformers_falcon_spec.errors import CheckpointError, OptionError

VOCAB_SIZE = 6
ORDERS = (1, 2, 3)


def _texts(*lengths: int, seed: int = 0, vocab_size: int = 4) -> list[list[int]]:
    """Random texts of few tokens, so that much comes again; tokens from `vocab_size` on never come."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


TOKENS = range(VOCAB_SIZE)
HISTORIES = [[], *([a] for a in TOKENS), *([a, b] for a in TOKENS for b in TOKENS), [0, 0, 1, 2], [9, 1, 0]]


def _all_probs(proxy: Any) -> list[list[float]]:
    """The probability of every token after every history of two tokens, and after some of other lengths."""
    return [proxy.probs(history, TOKENS) for history in HISTORIES]


def _naive_probs(texts: list[list[int]], order: int) -> list[list[float]]:
    naive = WittenBell(texts, order, VOCAB_SIZE)
    return [[naive.prob(history, token) for token in TOKENS] for history in HISTORIES]


def _approx(rows: list[list[float]]) -> list[Any]:
    return [pytest.approx(row, rel=1e-12) for row in rows]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lengths", [(30, 9, 1, 0, 2), (3,), (1,), ()])
def test_the_proxy_is_its_formula_and_a_distribution(order: int, lengths: tuple[int, ...]) -> None:
    texts = _texts(*lengths)

    found = _all_probs(NgramProxy.fit(texts, order, VOCAB_SIZE))

    assert [sum(row) for row in found] == _approx([[1.0] * len(found)])[0]
    assert found == _approx(_naive_probs(texts, order))


def test_a_proxy_without_text_finds_all_tokens_alike() -> None:
    found = _all_probs(NgramProxy.fit([], 3, VOCAB_SIZE))

    assert found == [[1 / VOCAB_SIZE] * VOCAB_SIZE] * len(HISTORIES)


def test_what_is_known_of_the_same_tokens_is_taken_from_there() -> None:
    proxy, known = NgramProxy.fit(_texts(40), 3, VOCAB_SIZE), {}

    found = [proxy.probs(history, [3, 1, 5], known) for history in HISTORIES]

    assert found == [proxy.probs(history, [3, 1, 5]) for history in HISTORIES]
    assert set(known) == {tuple(history[-2:][start:]) for history in HISTORIES for start in range(3)}
    known[0, 1] = [0.5, 0.25, 0.25]
    assert proxy.probs([0, 1], [3, 1, 5], known) == known[0, 1]


def test_a_copy_says_the_same() -> None:
    proxy = NgramProxy.fit(_texts(40), 3, VOCAB_SIZE)

    assert _all_probs(copy.deepcopy(proxy)) == _all_probs(pickle.loads(pickle.dumps(proxy))) == _all_probs(proxy)  # noqa: S301


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cuts", [(24,), (1, 1, 5, 17), (2, 0, 22), (3, 21)])
def test_a_context_counts_as_if_it_had_been_fitted(order: int, cuts: tuple[int, ...]) -> None:
    texts, (own,) = _texts(30, 8), _texts(24, seed=8, vocab_size=VOCAB_SIZE)
    shared = NgramProxy.fit(texts, order, VOCAB_SIZE)
    before, context = _all_probs(shared), ContextProxy(shared)

    for cut, end in zip(cuts, torch.tensor(cuts).cumsum(0).tolist(), strict=True):
        context.update(own[end - cut : end])

    together = NgramProxy.fit([*texts, own], order, VOCAB_SIZE)
    assert _all_probs(context) == _approx(_all_probs(together))
    assert _all_probs(shared) == before  # nobody else learns from it


def test_two_contexts_learn_apart() -> None:
    first, second = (ContextProxy(NgramProxy.fit([], 3, VOCAB_SIZE)) for _ in range(2))

    first.update([1, 2, 3])

    assert _all_probs(first) != _all_probs(second)
    assert _all_probs(second) == _all_probs(NgramProxy.fit([], 3, VOCAB_SIZE))


@pytest.mark.parametrize("order", ORDERS)
def test_a_saved_proxy_says_the_same(tmp_path: Path, order: int) -> None:
    proxy = NgramProxy.fit(_texts(50), order, VOCAB_SIZE)

    proxy.save(tmp_path / "new")
    loaded = NgramProxy.load(tmp_path / "new" / "ngram_proxy.safetensors", VOCAB_SIZE)

    assert (loaded.order, loaded.vocab_size) == (order, VOCAB_SIZE)
    assert _all_probs(loaded) == _all_probs(proxy)


@pytest.mark.parametrize("num_bytes", [0, 5, 100, -1])
def test_counts_that_were_cut_short_are_refused(tmp_path: Path, num_bytes: int) -> None:
    NgramProxy.fit(_texts(50), 3, VOCAB_SIZE).save(tmp_path)
    path = tmp_path / "ngram_proxy.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])

    with pytest.raises(CheckpointError, match="must hold files that can be read"):
        NgramProxy.load(path, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("texts", "order", "vocab_size", "message"),
    [
        ([], 0, 5, "`order` must lie from 1 to 3"),
        ([], 4, 5, "`order` must lie from 1 to 3"),
        ([[1, 5]], 2, 5, "from 0 to 4, but they lie from 1 to 5"),
        ([[1, -1]], 2, 5, "from 0 to 4, but they lie from -1 to 1"),
    ],
)
def test_what_cannot_be_counted_is_refused(texts: list[list[int]], order: int, vocab_size: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        NgramProxy.fit(texts, order, vocab_size)
