"""Processors of fixed shape: bit for bit what the stock ones give row by row, as work that a capture can repeat."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock

from tests.tape import taped
from transformers_falcon_spec.generation.capture.scoring import DeviceScoring, obstacle_to
from transformers_falcon_spec.generation.processors import of_row

VOCAB, ROWS, CPU = 40, 3, torch.device("cpu")
TEXTS = [torch.tensor([text]) for text in ([0, 0, 5, 7], [0, 9, 5, 11, 3], [8, 6, 7, 5, 3, 9])]  # 0 is padding
ALL: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "temperature": lambda: [stock.TemperatureLogitsWarper(0.7)],
    "top-k": lambda: [stock.TopKLogitsWarper(5)],
    "a top-k beyond the vocabulary": lambda: [stock.TopKLogitsWarper(99)],
    "top-p": lambda: [stock.TopPLogitsWarper(0.8, min_tokens_to_keep=2)],
    "min-p": lambda: [stock.MinPLogitsWarper(0.1)],
    "typical": lambda: [stock.TypicalLogitsWarper(0.7)],
    "epsilon": lambda: [stock.EpsilonLogitsWarper(0.02)],
    "normalization": lambda: [stock.LogitNormalization()],
    "no infinite ones": lambda: [stock.InfNanRemoveLogitsProcessor()],
    "suppressed": lambda: [stock.SuppressTokensLogitsProcessor(range(3, 30))],
    "suppressed at the beginning": lambda: [stock.SuppressTokensAtBeginLogitsProcessor([1, 2], 6)],
    "a least length": lambda: [stock.MinLengthLogitsProcessor(7, [4, 5])],
    "no least length": lambda: [stock.MinLengthLogitsProcessor(0, 4)],
    "a least number of new tokens": lambda: [stock.MinNewTokensLengthLogitsProcessor(4, 3, 5)],
    "a forced beginning": lambda: [stock.ForcedBOSTokenLogitsProcessor(4)],
    "a forced end": lambda: [stock.ForcedEOSTokenLogitsProcessor(8, [4, 5])],
    "biased tokens": lambda: [stock.SequenceBiasLogitsProcessor({(4,): 2.0, (7,): -3.5, (9,): -0.0})],
    "forbidden tokens": lambda: [stock.NoBadWordsLogitsProcessor([[4], [7]], eos_token_id=7)],
    "a penalty": lambda: [stock.RepetitionPenaltyLogitsProcessor(1.3)],
    "a penalty of what is written": lambda: [stock.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=3)],
    "a penalty that begins after the text": lambda: [stock.RepetitionPenaltyLogitsProcessor(1.3, 6)],
    "two penalties": lambda: [
        stock.RepetitionPenaltyLogitsProcessor(1.3, 4),
        stock.RepetitionPenaltyLogitsProcessor(0.8),
    ],
    "a penalty of one prompt": lambda: [stock.EncoderRepetitionPenaltyLogitsProcessor(1.5, TEXTS[2])],
    "a penalty of each prompt": lambda: [
        stock.EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.cat([text[:, :4] for text in TEXTS]))
    ],
    "many": lambda: [
        stock.RepetitionPenaltyLogitsProcessor(1.3),
        stock.MinNewTokensLengthLogitsProcessor(4, 3, 5),
        *(stock.TemperatureLogitsWarper(0.7), stock.TopKLogitsWarper(20), stock.TopPLogitsWarper(0.8)),
        stock.LogitNormalization(),
    ],
}

CHANGE_NOTHING_HERE = {"none", "a top-k beyond the vocabulary", "no least length", "a forced beginning"}


def _made(processors: LogitsProcessorList, device: torch.device = CPU) -> DeviceScoring:
    assert obstacle_to(processors, ROWS) is None
    return DeviceScoring(processors, ROWS, VOCAB, device)


class Walk:
    """Two steps of a walk of three depths, on scores and tokens that lie in buffers, as the captured step does it."""

    def __init__(self, scoring: DeviceScoring, device: torch.device = CPU) -> None:
        self.scoring = scoring
        self.raw = torch.zeros(3, ROWS, VOCAB, device=device)
        self.tokens = torch.zeros(3, ROWS, 1, dtype=torch.long, device=device)
        self.is_added = torch.zeros(3, ROWS, 1, dtype=torch.bool, device=device)
        self.scores = torch.zeros_like(self.raw)

    def work(self) -> None:
        self.scoring.begin()
        for depth in range(3):
            self.scores[depth].copy_(self.scoring.score(self.raw[depth]))
            self.scoring.add(self.tokens[depth], self.is_added[depth])
        self.scoring.end()

    def fill(self, seed: int) -> None:
        """Other scores, some of them not finite, and other tokens, of which rows take 3, 1 and 0."""
        rng = torch.Generator().manual_seed(seed)
        self.raw.copy_(torch.randn(self.raw.shape, generator=rng) * 3)
        self.raw[:, 1, ::7] = float("-inf")
        self.tokens.copy_(torch.randint(VOCAB, self.tokens.shape, generator=rng))
        self.is_added.copy_(torch.arange(3)[:, None, None] < torch.tensor([3, 1, 0])[:, None])
        self.tokens[1:, 2] = 10**9  # of no meaning where nothing is added


def _stock(processors: LogitsProcessorList, walks: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """What the row's own processors give for each row alone, as its text grows."""
    texts, found = list(TEXTS), []
    row_lists = [of_row(processors, row, ROWS) for row in range(ROWS)]
    for raw, tokens, is_added in walks:
        for depth in range(3):
            rows = [row_lists[row](texts[row], raw[depth, row : row + 1].clone()) for row in range(ROWS)]
            found.append(torch.cat(rows))
            for row in range(ROWS):
                if is_added[depth, row]:
                    texts[row] = torch.cat([texts[row], tokens[depth, row][None]], dim=-1)
    return found


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_taped", [False, True])
def test_scores_are_those_of_the_stock_processors(name: str, is_taped: bool) -> None:
    processors = LogitsProcessorList(ALL[name]())
    scoring = _made(processors)
    walk = Walk(scoring)
    repeat = taped(walk.work) if is_taped else walk.work
    scoring.reset(processors, TEXTS)

    walks, found = [], []
    for seed in range(3):
        walk.fill(seed)
        repeat()
        walks.append((walk.raw.clone(), walk.tokens.clone(), walk.is_added.clone()))
        found += list(walk.scores.clone())

    expected = _stock(LogitsProcessorList(ALL[name]()), walks)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.view(torch.int32).equal(theirs.view(torch.int32))  # bit for bit, signs of zeros included
    raws = torch.cat([raw for raw, *_ in walks])
    assert (name in CHANGE_NOTHING_HERE) == torch.stack(found).equal(raws)


def test_a_beginning_is_forced_after_one_token_alone() -> None:
    processors = LogitsProcessorList(ALL["a forced beginning"]())
    scoring, raw = _made(processors), torch.randn(ROWS, VOCAB)
    scoring.reset(processors, [torch.tensor([[5]]), *TEXTS[1:]])
    scoring.begin()

    scores = scoring.score(raw)

    assert scores[0].equal(processors(torch.tensor([[5]]), raw[:1])[0])
    assert scores[0].isfinite().nonzero().tolist() == [[4]]
    assert scores[1:].equal(raw[1:])


@pytest.mark.parametrize("name", ALL)
def test_the_work_asks_nothing_of_the_host(name: str) -> None:
    scoring = _made(LogitsProcessorList(ALL[name]()), torch.device("meta"))

    Walk(scoring, torch.device("meta")).work()


def test_a_walk_that_does_not_end_leaves_the_texts_as_they_were() -> None:
    processors = LogitsProcessorList(ALL["a penalty"]())
    scoring = _made(processors)
    scoring.reset(processors, TEXTS)
    before = [tensor.clone() for tensor in scoring.state]

    scoring.begin()
    scoring.add(torch.full((ROWS, 1), 20), torch.ones(ROWS, 1, dtype=torch.bool))

    assert all(kept.equal(old) for kept, old in zip(scoring.state, before, strict=True))
    scoring.end()
    assert scoring.state[1][:, 20].all()


@pytest.mark.skipif(
    "Tensor" not in str(stock.RepetitionPenaltyLogitsProcessor.__init__.__annotations__["prompt_ignore_length"]),
    reason="this version of Transformers, such as 5.17, counts padding as text",
)
def test_padding_of_each_row_counts_as_its_own_processor_says() -> None:
    processors = LogitsProcessorList([stock.RepetitionPenaltyLogitsProcessor(1.3, torch.tensor([2, 1, 0]))])
    scoring = _made(processors)
    scoring.reset(processors, TEXTS)
    scoring.begin()
    raw = torch.ones(ROWS, VOCAB)

    scores = scoring.score(raw)

    assert scores[:, 0].tolist() == [1, 1, 1]
    assert scores.equal(torch.cat([of_row(processors, row, ROWS)(text, raw[:1]) for row, text in enumerate(TEXTS)]))


def test_captured_work_serves_the_next_call_where_only_prompts_differ() -> None:
    first = LogitsProcessorList([stock.MinNewTokensLengthLogitsProcessor(4, 1, 5), *ALL["a penalty of one prompt"]()])
    second = LogitsProcessorList(
        [
            stock.MinNewTokensLengthLogitsProcessor(5, 9, 6),
            stock.EncoderRepetitionPenaltyLogitsProcessor(1.5, TEXTS[0]),
        ]
    )
    scoring = _made(first)
    walk = Walk(scoring)
    scoring.reset(first, TEXTS)
    repeat = taped(walk.work)

    assert scoring.fits(second)
    scoring.reset(second, TEXTS)
    walk.fill(0)
    repeat()

    expected = _stock(second, [(walk.raw, walk.tokens, walk.is_added)])
    assert walk.scores.equal(torch.stack(expected))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("temperature", [stock.TemperatureLogitsWarper(0.8)]),
        ("temperature", []),
        ("top-p", [stock.TopPLogitsWarper(0.8)]),
        ("a penalty", [stock.RepetitionPenaltyLogitsProcessor(1.2)]),
        ("a penalty", [stock.TemperatureLogitsWarper(1.3)]),
        ("biased tokens", [stock.SequenceBiasLogitsProcessor({(4, 5): 2.0})]),
    ],
)
def test_work_fits_processors_of_its_own_settings_alone(name: str, other: list[Any]) -> None:
    scoring = _made(LogitsProcessorList(ALL[name]()))

    assert scoring.fits(LogitsProcessorList(ALL[name]()))
    assert not scoring.fits(LogitsProcessorList(other))


class Cooling(stock.TemperatureLogitsWarper):
    """A subclass, which may look at the text."""


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (Cooling(0.5), "`Cooling` is not known"),
        (stock.EtaLogitsWarper(0.1), "`EtaLogitsWarper` is not known"),
        (stock.TopHLogitsWarper(0.5), "`TopHLogitsWarper` is not known"),
        (stock.NoRepeatNGramLogitsProcessor(2), "`NoRepeatNGramLogitsProcessor` is not known"),
        (stock.ExponentialDecayLengthPenalty((1, 1.1), 4, 3), "`ExponentialDecayLengthPenalty` is not known"),
        (stock.NoBadWordsLogitsProcessor([[4], [5, 6]]), "a bias for several tokens in a row"),
        (stock.EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.ones(2, 4).long()), "has 2 prompts for 3 rows"),
    ],
)
def test_the_processor_in_the_way_is_named(processor: Any, reason: str) -> None:
    found = obstacle_to(LogitsProcessorList([stock.TemperatureLogitsWarper(0.5), processor]), ROWS)

    assert found is not None
    assert reason in found
    assert not found.endswith(".")  # it ends a note
