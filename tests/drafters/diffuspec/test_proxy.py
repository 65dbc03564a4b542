"""The proxy: against its formula, as a distribution, over lattices, in a context, and on disk."""

import json
from pathlib import Path

import pytest
import torch

from tests.drafters.diffuspec.naive import WittenBell
from transformers_falcon_spec.drafters.diffuspec.proxy import NgramProxy
from transformers_falcon_spec.errors import CheckpointError, OptionError

VOCAB_SIZE = 6
ORDERS = (1, 2, 3)


def _texts(*lengths: int, seed: int = 0, vocab_size: int = 4) -> list[list[int]]:
    """Random texts of few tokens, so that much comes again; tokens from `vocab_size` on never come."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _all_log_probs(proxy: NgramProxy, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """`[histories, vocab]` after every history of two tokens."""
    tokens = torch.arange(-1, vocab_size)
    histories = torch.cartesian_prod(tokens, tokens)
    histories = histories[(histories[:, 1] >= 0) | (histories[:, 0] < 0)]
    return proxy.log_probs(histories, torch.arange(vocab_size).expand(len(histories), -1))


def _naive_log_probs(naive: WittenBell) -> torch.Tensor:
    def text(history: list[int]) -> list[int]:
        return [token for token in history if token >= 0]

    histories = [[-1, -1], *([a, b] for a in range(-1, VOCAB_SIZE) for b in range(VOCAB_SIZE))]
    probs = [[naive.prob(text(history), token) for token in range(VOCAB_SIZE)] for history in histories]
    return torch.tensor(probs, dtype=torch.double).log()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lengths", [(30, 9, 1, 0, 2), (3,), (1,), ()])
def test_the_proxy_is_its_formula_and_a_distribution(order: int, lengths: tuple[int, ...]) -> None:
    texts = _texts(*lengths)

    found = _all_log_probs(NgramProxy.fit(texts, order, VOCAB_SIZE))

    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(found), dtype=torch.double))
    torch.testing.assert_close(found, _naive_log_probs(WittenBell(texts, order, VOCAB_SIZE)))


def test_a_proxy_without_text_finds_all_tokens_alike() -> None:
    found = _all_log_probs(NgramProxy.fit([], 3, VOCAB_SIZE)).exp()

    torch.testing.assert_close(found, torch.full_like(found, 1 / VOCAB_SIZE))


def test_the_largest_vocabulary_fits() -> None:
    last, size = 2**21 - 1, 2**21

    proxy = NgramProxy.fit([[last, last - 1, last, last - 1, last, 0]], 3, size)

    candidates = torch.tensor([[last, 0, last - 1, 5]])
    naive = WittenBell([[last, last - 1, last, last - 1, last, 0]], 3, size)
    expected = [naive.prob([last - 1, last], token) for token in candidates[0].tolist()]
    assert proxy.log_probs(torch.tensor([[last - 1, last]]), candidates).exp()[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("history", [[], [2], [1, 0], [3, 1, 2]])
@pytest.mark.parametrize("has_context", [False, True])
def test_a_lattice_gets_what_each_of_its_histories_gets(order: int, history: list[int], has_context: bool) -> None:
    proxy = NgramProxy.fit(_texts(40), order, VOCAB_SIZE)
    if has_context:
        proxy = proxy.in_context()
        proxy.update(_texts(15, seed=3)[0])
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.stack([torch.randperm(VOCAB_SIZE, generator=generator)[:4] for _ in range(5)])
    num = torch.tensor([4, 1, 3, 4, 2])

    found = proxy.over_lattice(token_ids, num, history)

    text = [-1, -1, *history]
    for place, a, b in torch.cartesian_prod(torch.arange(5), torch.arange(4), torch.arange(4)).tolist():
        befores = [[text[-2]], [text[-1]], *(row[:n].tolist() for row, n in zip(token_ids, num, strict=True))]
        starts = (a if place > 1 else 0, b if place > 0 else 0)
        if (place < 2 and a) or (place < 1 and b) or max(a - len(befores[place]), b - len(befores[place + 1])) >= 0:
            continue  # no such history
        before = torch.tensor([[befores[place][starts[0]], befores[place + 1][starts[1]]]])
        row = int(found.index[place, a, b])
        assert int(found.places[row]) == place
        torch.testing.assert_close(found.rows[row], proxy.log_probs(before, token_ids[place][None])[0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cuts", [(24,), (1, 1, 5, 17), (2, 0, 22), (3, 21)])
def test_a_context_counts_as_if_it_had_been_fitted(order: int, cuts: tuple[int, ...]) -> None:
    texts, (own,) = _texts(30, 8), _texts(24, seed=8, vocab_size=VOCAB_SIZE)
    shared = NgramProxy.fit(texts, order, VOCAB_SIZE)
    before, context = _all_log_probs(shared), shared.in_context()

    for cut, end in zip(cuts, torch.tensor(cuts).cumsum(0).tolist(), strict=True):
        context.update(own[end - cut : end])

    together = NgramProxy.fit([*texts, own], order, VOCAB_SIZE)
    torch.testing.assert_close(_all_log_probs(context), _all_log_probs(together), rtol=1e-12, atol=0)
    assert _all_log_probs(shared).equal(before)  # nobody else learns from it


def test_two_contexts_learn_apart() -> None:
    first, second = (NgramProxy.fit([], 3, VOCAB_SIZE).in_context() for _ in range(2))

    first.update([1, 2, 3])

    assert not _all_log_probs(first).equal(_all_log_probs(second))
    assert _all_log_probs(second).equal(_all_log_probs(NgramProxy.fit([], 3, VOCAB_SIZE)))


@pytest.mark.parametrize("order", ORDERS)
def test_a_saved_proxy_says_the_same(tmp_path: Path, order: int) -> None:
    proxy = NgramProxy.fit(_texts(50), order, VOCAB_SIZE)

    proxy.save(tmp_path / "new")
    loaded = NgramProxy.load(tmp_path / "new")

    assert (loaded.order, loaded.vocab_size) == (order, VOCAB_SIZE)
    assert _all_log_probs(loaded).equal(_all_log_probs(proxy))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    NgramProxy.fit(_texts(50), 3, VOCAB_SIZE).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["ngram_proxy.safetensors", "ngram_proxy.json"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()

    with pytest.raises(CheckpointError, match=f"{name}` is not there"):
        NgramProxy.load(saved)


@pytest.mark.parametrize("num_bytes", [0, 5, 100, -1])
def test_counts_that_were_cut_short_are_refused(saved: Path, num_bytes: int) -> None:
    path = saved / "ngram_proxy.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])

    with pytest.raises(CheckpointError, match=r"must be a whole safetensors file"):
        NgramProxy.load(saved)


def test_counts_that_were_changed_are_refused(saved: Path) -> None:
    path = saved / "ngram_proxy.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match="must have the checksum"):
        NgramProxy.load(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 1, "ord', "must hold a JSON object, but it cannot be read"),
        ("[1]", "must be an object with"),
        ('{"version": 1}', "must be an object with"),
    ],
)
def test_a_description_that_is_none_is_refused(saved: Path, content: str, message: str) -> None:
    (saved / "ngram_proxy.json").write_text(content)

    with pytest.raises(CheckpointError, match=message):
        NgramProxy.load(saved)


def test_another_version_is_refused(saved: Path) -> None:
    path = saved / "ngram_proxy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))

    with pytest.raises(CheckpointError, match="must be of version 1, but it is of version 2"):
        NgramProxy.load(saved)


def test_a_context_is_not_saved(tmp_path: Path) -> None:
    for order in ORDERS:
        with pytest.raises(OptionError, match="belongs to a context"):
            NgramProxy.fit([], order, VOCAB_SIZE).in_context().save(tmp_path)


@pytest.mark.parametrize(
    ("texts", "order", "vocab_size", "message"),
    [
        ([], 0, 5, "`order` must lie from 1 to 3"),
        ([], 4, 5, "`order` must lie from 1 to 3"),
        ([], 3, 2**21 + 1, "`vocab_size` from 1 to 2097152"),
        ([[1, 5]], 2, 5, "from 0 to 4, but they lie from 1 to 5"),
        ([[1, -1]], 2, 5, "from 0 to 4, but they lie from -1 to 1"),
    ],
)
def test_what_cannot_be_counted_is_refused(texts: list[list[int]], order: int, vocab_size: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        NgramProxy.fit(texts, order, vocab_size)
