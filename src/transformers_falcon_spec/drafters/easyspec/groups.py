"""Which layers of a draft model attend at once: the default groups, and what groups must be."""

from collections.abc import Sequence

from ...errors import OptionError

SHALLOW, SHALLOW_SIZE, DEFAULT_SIZE = 16, 2, 4  # arXiv 2502.02493, table 1


def build_groups(num_layers: int, group_size: int | None = None) -> list[list[int]]:
    """Groups of `group_size` layers; the first and the last layer stand alone.

    Where the layers between those two make whole groups, these follow each other from layer 1 on, as in the paper's
    model of 16 layers; else groups end before multiples of `group_size`, as in its models of 28 and 32. Left out it is
    2 for models of up to 16 layers, else 4, as in the paper; 1 drafts as the model itself does.

    Example:

    ```python
    >>> build_groups(10, 4)
    [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
    >>> build_groups(12, 4)
    [[0], [1, 2, 3], [4, 5, 6, 7], [8, 9, 10], [11]]

    ```
    """
    default = SHALLOW_SIZE if num_layers <= SHALLOW else DEFAULT_SIZE
    group_size = default if group_size is None else group_size
    for name, value in (("num_layers", num_layers), ("group_size", group_size)):
        if value < 1:
            raise OptionError(f"`{name}` must be at least 1, but it is {value}.")
    is_even = (num_layers - 2) % group_size == 0
    groups, start = [[0]], 1
    while start < num_layers - 1:
        end = start + group_size if is_even else (start // group_size + 1) * group_size
        end = min(end, num_layers - 1)
        groups.append(list(range(start, end)))
        start = end
    return groups if num_layers == 1 else [*groups, [num_layers - 1]]


def check_groups(groups: Sequence[Sequence[int]], num_layers: int) -> None:
    """Refuse groups that do not divide the layers in their order, or that hold the first or last: [`OptionError`]."""
    remedy = "Leave `layer_groups` out to get the default ones."
    flat = [layer for group in groups for layer in group]
    missing, twice = sorted(set(range(num_layers)) - set(flat)), sorted({n for n in flat if flat.count(n) > 1})
    unknown = sorted(set(flat) - set(range(num_layers)))
    for reason, layers in (("leave out", missing), ("name twice", twice), ("name, though there is none,", unknown)):
        if layers:
            raise OptionError(
                f"`layer_groups` must hold each of the {num_layers} layers once, but they {reason} {layers}. {remedy}"
            )
    if flat != sorted(flat) or not all(groups):
        raise OptionError(
            "`layer_groups` must hold the layers in ascending order, without empty groups, but they are "
            f"{list(groups)}. {remedy}"
        )
    ends = [group for group in groups if len(group) > 1 and (0 in group or num_layers - 1 in group)]
    if ends:
        raise OptionError(
            f"The first and the last layer, 0 and {num_layers - 1}, must each be a group of its own, for drafts "
            f"suffer most from errors there, but `layer_groups` holds {ends[0]}. {remedy}"
        )
