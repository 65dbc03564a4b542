"""Draft lengths: the published formula on numbers worked out by hand."""

import pytest

from transformers_falcon_spec.drafters.diffuspec.drafter import DraftLength


def _lengths(adaptive: DraftLength, observed: list[tuple[int, int]]) -> list[int]:
    lengths = [adaptive.length]
    for num_generated, num_accepted in observed:
        adaptive.observe(num_generated, num_accepted)
        lengths.append(adaptive.length)
    return lengths


def test_the_published_length_falls_from_30_to_20_at_once() -> None:
    assert _lengths(DraftLength(20, 30, delta=10, rho=0.5), [(30, 7), (20, 7), (20, 7)]) == [30, 20, 20, 20]


def test_a_draft_accepted_whole_is_followed_by_a_longer_one() -> None:
    # averages 15 and 15: 15 + 10; then 20 and 20: 20 + 10; then 20 (of 20, 20) and 10.5: 20
    assert _lengths(DraftLength(20, 30, delta=10, rho=0.5), [(30, 30), (25, 25), (20, 1)]) == [30, 25, 30, 20]


@pytest.mark.parametrize(
    ("num_generated", "length"),
    [(15, 8), (14, 7), (13, 7), (1, 2)],  # ceil(7.5), ceil(7), ceil(6.5), and ceil(0.5) below the least
)
def test_the_length_is_rounded_up(num_generated: int, length: int) -> None:
    assert _lengths(DraftLength(2, 16, delta=10, rho=0.5), [(num_generated, 0)]) == [16, length]


def test_the_newest_draft_weighs_rho() -> None:
    adaptive = DraftLength(min_length=1, max_length=100, delta=0, rho=0.25)

    assert _lengths(adaptive, [(80, 0), (40, 0)]) == [100, 20, 25]  # .75 * 20 + .25 * 40


def test_delta_is_added_where_as_much_is_accepted_as_generated() -> None:
    def after(num_accepted: int) -> int:
        return _lengths(DraftLength(1, 40, delta=3, rho=1), [(10, num_accepted)])[1]

    assert [after(num) for num in (9, 10, 11)] == [10, 13, 13]


def test_a_length_between_equal_bounds_stays() -> None:
    assert _lengths(DraftLength(5, 5, delta=10, rho=0.5), [(5, 0), (5, 5)]) == [5, 5, 5]
