"""What followed the newest tokens where they stood before: the fast look-up against its naive twin, and its odds."""

import math
import random
from itertools import accumulate
from operator import mul

import pytest
import torch

from transformers_falcon_spec.drafters.tree_drafting.repeated_text import (
    LONGEST_MATCH,
    PRIOR,
    SURE,
    RepeatedText,
    RowText,
)
from transformers_falcon_spec.generation.drafting import Committed, Kept, Prices


def naive_match(text: list[int], max_ngram_size: int) -> tuple[int, int] | None:
    """The twin: every place is compared, the longest n-gram first, and the latest place of it."""
    for size in range(max_ngram_size, 0, -1):
        for start in range(len(text) - 1, size - 1, -1):
            if text[start - size : start] == text[len(text) - size :]:
                length = size
                while length < min(LONGEST_MATCH, start) and text[start - length - 1] == text[-length - 1]:
                    length += 1
                return start, length
    return None


def naive_continuation(text: list[int], start: int, num_tokens: int) -> list[int]:
    """The twin: the text is continued token by token, and read on where it was continued."""
    longer = list(text)
    for index in range(start, start + num_tokens):
        longer.append(longer[index])
    return longer[len(text) :]


def row_of(text: list[int], max_ngram_size: int = 3) -> RowText:
    row = RowText(max_ngram_size)
    row.add(text, is_prompt=True)
    return row


@pytest.mark.parametrize("max_ngram_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_kinds", [2, 4, 30])
def test_matches_and_continuations_are_those_of_the_naive_twin(num_kinds: int, max_ngram_size: int) -> None:
    rng, num_matches = random.Random(num_kinds), 0
    row, text = RowText(max_ngram_size), list[int]()

    for step in range(60):
        new = [rng.randrange(num_kinds) for _ in range(rng.randint(1, 3))]
        text += new
        row.add(new, is_prompt=step == 0)
        match = naive_match(text, max_ngram_size)
        found = row.match()
        assert (found and (found.start, found.length)) == match
        tokens, log_probs = row.continuation(7)
        assert tokens == ([] if match is None else naive_continuation(text, match[0], 7))
        assert log_probs == sorted(log_probs, reverse=True)
        num_matches += match is not None

    assert num_matches > 20


def test_a_loop_goes_round_as_often_as_there_is_room() -> None:
    tokens, log_probs = row_of([9, 1, 2, 1, 2]).continuation(5)

    assert tokens == [1, 2, 1, 2, 1]
    matched = [2, 3, 4, 5, 6]
    expected = [math.prod(PRIOR[length - 1] for length in matched[:end]) for end in range(1, 6)]
    assert [math.exp(value) for value in log_probs] == pytest.approx(expected)


def test_what_came_again_is_expected_again_and_the_prompt_says_nothing_of_it() -> None:
    loop = [4, 5, 6] * 30
    prompted, written = row_of(loop), row_of(loop[:3])

    written.add(loop[3:], is_prompt=False)

    assert prompted.continuation(10)[0] == written.continuation(10)[0]
    assert math.exp(prompted.continuation(1)[1][0]) == pytest.approx(PRIOR[-1])
    assert math.exp(written.continuation(10)[1][-1]) > SURE
    erratic = row_of([1, 2, 1, 3])
    erratic.add([1, 4, 1, 5, 1, 6, 1], is_prompt=False)
    assert math.exp(erratic.continuation(1)[1][0]) < PRIOR[0]  # one token alone says less than was thought


def committed(texts: list[list[int]], num_new: tuple[int, ...]) -> Committed:
    lengths = tuple(map(len, texts))
    ids = torch.full((len(texts), max(lengths) + 2), 77)  # later tokens may stand in the buffer already
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    return Committed(ids, lengths, num_new, None)


def test_rows_have_branches_of_their_own_as_long_as_their_depths() -> None:
    text = RepeatedText(num_tokens=4, max_ngram_size=2)
    text.commit(committed([[1, 2, 3, 1, 2], [1, 2, 3, 4, 5], [8, 8]], (5, 5, 2)))

    branch = text.branch((10, 10, 3), most=100)
    assert branch is not None
    assert branch.token_ids.tolist() == [[3, 1, 2, 3], [-1] * 4, [8, 8, 8, -1]]
    assert (branch.log_probs == -math.inf).tolist() == (branch.token_ids == -1).tolist()
    assert branch.log_probs[0].exp().tolist() == pytest.approx(list(accumulate(PRIOR[1:5], mul)))
    assert branch.log_probs[2].exp().tolist() == pytest.approx([*accumulate(PRIOR[:3], mul), 0.0])
    assert branch.expected_by_depth(torch.tensor([[1], [0], [9]])).tolist() == pytest.approx(
        [0.0, 0.0, *(math.prod(PRIOR[1:end]) for end in (3, 4, 5))]
    )
    assert not branch.is_sure
    assert len(text.branch((10, 10, 3), most=2) or ()) == 2
    assert text.branch((0, 5, 0), most=100) is None
    text.select_rows([1, 0])
    assert [row.token_ids[2] for row in text._rows] == [3, 3]
    text.commit_kept(Kept(torch.zeros(2, 3), None, torch.zeros(2, 1), (1, 2), ((3,), (3, 1))))
    branch = text.branch((3, 3), most=100)
    assert branch is not None
    assert branch.token_ids.tolist() == [[4, 5, 3], [2, 3, 1]]


def test_only_tokens_that_bring_more_than_they_cost_are_read() -> None:
    text = RepeatedText(num_tokens=6, max_ngram_size=2)
    text.commit(committed([[1, 2, 3, 1, 2]], (5,)))
    branch = text.branch((10,), most=100)
    assert branch is not None
    prob = branch.log_probs.exp()[0].tolist()

    def paying(price: float, num_before: int = 3) -> int:
        prices = Prices(torch.arange(8) * price, [0.0], [1.0], torch.ones(3), 0)
        return len(branch.paying(prices, num_before))

    assert paying(0.0) == 5  # there are no prices of more nodes
    assert paying((prob[1] + prob[2]) / 2) == 2
    assert paying(prob[0] + 0.01) == 0
    assert paying(0.0, num_before=8) == 0
