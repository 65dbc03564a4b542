"""Several texts in one row: numbers, masks and unpacking, each compared with plain loops over the texts."""

import pytest
import torch
from torch import Tensor

from transformers_falcon_spec.core.packing import (
    is_packed,
    one_text,
    same_text,
    text_lengths,
    text_numbers,
    unpack,
)

ROWS = [[3, 1, 4], [8], [2, 6]]  # lengths of the texts of each row


def positions_of(rows: list[list[int]]) -> Tensor:
    return torch.tensor([[position for length in row for position in range(length)] for row in rows])


def texts_of(rows: list[list[int]]) -> list[tuple[int, list[int]]]:
    """The row of each text and the columns of its tokens."""
    found = []
    for number, row in enumerate(rows):
        starts = [sum(row[:index]) for index in range(len(row))]
        found += [(number, list(range(start, start + size))) for start, size in zip(starts, row, strict=True)]
    return found


@pytest.mark.parametrize(
    ("positions", "expected"),
    [(positions_of(ROWS), True), (positions_of([[8], [8]]), False), (one_text(8, torch.device("cpu")), False)],
)
def test_rows_are_packed_where_any_holds_two_texts(positions: Tensor, expected: bool) -> None:
    assert is_packed(positions) is expected


def test_texts_are_counted_through_all_rows() -> None:
    numbers = text_numbers(positions_of(ROWS), 3)

    for number, (row, columns) in enumerate(texts_of(ROWS)):
        assert numbers[row, columns].tolist() == [number] * len(columns)
    assert text_lengths(numbers) == [3, 1, 4, 8, 2, 6]
    assert text_numbers(one_text(4, torch.device("cpu")), 3).tolist() == [[0] * 4, [1] * 4, [2] * 4]


def test_two_tokens_share_a_text_where_the_loops_say_so() -> None:
    expected = torch.zeros(3, 8, 8, dtype=torch.bool)
    for row, columns in texts_of(ROWS):
        for one in columns:
            for other in columns:
                expected[row, one, other] = True

    assert same_text(positions_of(ROWS)).equal(expected)
    assert same_text(one_text(5, torch.device("cpu"))).all()


def test_unpacked_texts_are_rows_of_their_own_and_can_be_packed_again() -> None:
    values, positions = torch.randn(3, 8, 2, requires_grad=True), positions_of(ROWS)
    numbers = text_numbers(positions, 3)

    texts = unpack(values, numbers, positions)

    assert texts.shape == (6, 8, 2)
    for number, (row, columns) in enumerate(texts_of(ROWS)):
        assert texts[number, : len(columns)].equal(values[row, columns])
        assert not texts[number, len(columns) :].any()
    assert texts[numbers, positions].equal(values)
    texts.sum().backward()
    assert values.grad is not None
    assert values.grad.eq(1).all()
