"""Divisions of an EasySpec drafter's layers into groups that attend at once, and the search for the best ones."""

from collections.abc import Mapping

Groups = list[list[int]]


def single_layers(num_layers: int) -> Groups:
    """Every layer alone: the draft model without groups."""
    return [[layer] for layer in range(num_layers)]


def with_group(num_layers: int, start: int, size: int) -> Groups:
    """One group of `size` layers from `start`, and all other layers alone."""
    layers = single_layers(num_layers)
    return [*layers[:start], list(range(start, start + size)), *layers[start + size :]]


def candidate_groups(num_layers: int, max_size: int) -> list[tuple[int, int]]:
    """Start and size of every group of 2 to `max_size` layers between the first and the last one."""
    return [(start, size) for size in range(2, max_size + 1) for start in range(1, num_layers - size)]


def best_divisions(num_layers: int, losses: Mapping[tuple[int, int], float]) -> list[Groups]:
    """The division of the layers that loses least, for each possible number of groups, most groups first.

    The loss of a division is estimated by the sum of what its groups lose alone.

    Args:
        num_layers (`int`): Layers of the model; the first and the last one stay alone.
        losses (`Mapping`): The loss of each candidate group, by start and size; a layer alone loses nothing.
    """
    pieces = {**dict.fromkeys(((layer, 1) for layer in range(1, num_layers - 1)), 0.0), **losses}
    best: dict[int, dict[int, tuple[float, Groups]]] = {1: {0: (0.0, [])}}  # by next layer and number of groups
    for end in range(2, num_layers):
        found: dict[int, tuple[float, Groups]] = {}
        for (start, size), loss in pieces.items():
            if start + size == end:
                for num, (before, groups) in best[start].items():
                    option = (before + loss, [*groups, list(range(start, end))])
                    found[num + 1] = min(found.get(num + 1, option), option)
        best[end] = found
    divisions = sorted(best[max(num_layers - 1, 1)].items(), reverse=True)
    return [[[0], *groups, [num_layers - 1]] if num_layers > 1 else [[0]] for _, (_, groups) in divisions]
