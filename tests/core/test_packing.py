"""Several texts in one row: numbers, masks, what lies ahead and rows taken apart, each against plain loops over the texts."""

import pytest
import torch
from torch import Tensor

from transformers_falcon_spec.core.packing import (
    is_packed,
    one_text,
    same_text,
    shift_left,
    text_lengths,
    text_numbers,
    unpack,
)

ROWS = [[3, 1, 4], [8], [2, 6]]  # lengths of the texts of each row


def positions_of(rows: list[list[int]]) -> Tensor:
    return torch.tensor([[place for length in row for place in range(length)] for row in rows])


def texts_of(rows: list[list[int]]) -> list[tuple[int, list[int]]]:
    """Of each text the row and the places of its tokens there."""
    found = []
    for number, row in enumerate(rows):
        starts = [sum(row[:place]) for place in range(len(row))]
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

    for number, (row, places) in enumerate(texts_of(ROWS)):
        assert numbers[row, places].tolist() == [number] * len(places)
    assert text_lengths(numbers) == [3, 1, 4, 8, 2, 6]
    assert text_numbers(one_text(4, torch.device("cpu")), 3).tolist() == [[0] * 4, [1] * 4, [2] * 4]


def test_two_tokens_share_a_text_where_the_loops_say_so() -> None:
    expected = torch.zeros(3, 8, 8, dtype=torch.bool)
    for row, places in texts_of(ROWS):
        for one in places:
            for other in places:
                expected[row, one, other] = True

    assert same_text(positions_of(ROWS)).equal(expected)
    assert same_text(one_text(5, torch.device("cpu"))).all()


@pytest.mark.parametrize("num_places", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
@pytest.mark.parametrize("rows", [ROWS, [[8]] * 3])
def test_what_lies_ahead_is_of_the_same_text_or_zero(
    rows: list[list[int]], shape: tuple[int, ...], num_places: int
) -> None:
    values = torch.randn(3, 8, *shape)
    expected = torch.zeros_like(values)
    for row, places in texts_of(rows):
        for place, later in zip(places, places[num_places:], strict=False):
            expected[row, place] = values[row, later]

    assert shift_left(values, positions_of(rows), num_places).equal(expected)
    assert shift_left(values != 0, positions_of(rows), num_places).equal(expected != 0)


def test_positions_of_all_rows_can_be_given_once() -> None:
    values = torch.randn(3, 8, 2)

    assert shift_left(values, one_text(8, torch.device("cpu")), 3).equal(
        shift_left(values, positions_of([[8]] * 3), 3)
    )


def test_texts_apart_are_rows_of_their_own_and_lead_back() -> None:
    values, positions = torch.randn(3, 8, 2, requires_grad=True), positions_of(ROWS)
    numbers = text_numbers(positions, 3)

    texts = unpack(values, numbers, positions)

    assert texts.shape == (6, 8, 2)
    for number, (row, places) in enumerate(texts_of(ROWS)):
        assert texts[number, : len(places)].equal(values[row, places])
        assert not texts[number, len(places) :].any()
    assert texts[numbers, positions].equal(values)
    texts.sum().backward()
    assert values.grad is not None
    assert values.grad.eq(1).all()
