"""Which layers attend at once: the default groups are the paper's, and what is no division of the layers is refused."""

import pytest

from transformers_falcon_spec.drafters.easyspec import build_groups, check_groups
from transformers_falcon_spec.errors import OptionError


def spans(text: str) -> list[list[int]]:
    """Groups as the paper writes them: `0 | 1-3 | 4`."""
    ends = [[int(end) for end in part.split("-")] for part in text.split("|")]
    return [list(range(end[0], end[-1] + 1)) for end in ends]


@pytest.mark.parametrize(
    ("num_layers", "group_size", "groups"),
    [
        (32, None, "0 | 1-3 | 4-7 | 8-11 | 12-15 | 16-19 | 20-23 | 24-27 | 28-30 | 31"),
        (28, None, "0 | 1-3 | 4-7 | 8-11 | 12-15 | 16-19 | 20-23 | 24-26 | 27"),
        (16, None, "0 | 1-2 | 3-4 | 5-6 | 7-8 | 9-10 | 11-12 | 13-14 | 15"),
        (16, 2, "0 | 1-2 | 3-4 | 5-6 | 7-8 | 9-10 | 11-12 | 13-14 | 15"),
        (16, 4, "0 | 1-3 | 4-7 | 8-11 | 12-14 | 15"),
        (8, 3, "0 | 1-3 | 4-6 | 7"),
        (9, 3, "0 | 1-2 | 3-5 | 6-7 | 8"),
        (4, 9, "0 | 1-2 | 3"),
        (17, None, "0 | 1-3 | 4-7 | 8-11 | 12-15 | 16"),
    ],
)
def test_the_default_groups_are_those_of_the_paper(num_layers: int, group_size: int | None, groups: str) -> None:
    assert build_groups(num_layers, group_size) == spans(groups)


def test_built_groups_hold_and_are_as_large_as_asked() -> None:
    for num_layers in range(1, 25):
        for group_size in range(1, 7):
            groups = build_groups(num_layers, group_size)

            check_groups(groups, num_layers)
            largest = max(map(len, groups))
            assert largest <= group_size
            assert num_layers < 2 * group_size + 1 or largest == group_size


@pytest.mark.parametrize(
    "groups",
    [
        [[0], [1, 3], [4]],
        [[0], [1, 2], [2, 3], [4]],
        [[0], [1, 2, 3], [4], [5]],
        [[0], [2, 1], [3], [4]],
        [[0], [1, 2], [], [3], [4]],
        [[0, 1], [2, 3], [4]],
        [[0], [1, 2], [3, 4]],
        [[0, 1, 2, 3, 4]],
        [],
    ],
)
def test_groups_that_are_no_division_of_the_layers_are_refused(groups: list[list[int]]) -> None:
    with pytest.raises(OptionError, match="must hold each of the 5 layers once and in order, the first and the last"):
        check_groups(groups, 5)


def test_groups_of_no_layer_are_refused() -> None:
    with pytest.raises(OptionError, match="`group_size` must be at least 1, but it is 0"):
        build_groups(4, 0)
