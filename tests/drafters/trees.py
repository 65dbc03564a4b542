"""Random draft trees."""

import random

Lists = tuple[list[int], list[int]]  # parents and sibling ranks


def random_tree(depth: int, num_nodes: int, seed: int) -> Lists:
    """A path of `depth` nodes and others anywhere; ranks have gaps."""
    draws = random.Random(seed)
    parents, ranks, depths = [-1], [-1], [0]
    while len(parents) < num_nodes:
        node = len(parents)
        shallow = [other for other in range(node) if depths[other] < depth]
        parents.append(node - 1 if node <= depth else draws.choice(shallow))
        taken = {rank for rank, parent in zip(ranks, parents[:-1], strict=True) if parent == parents[-1]}
        ranks.append(draws.choice([rank for rank in range(8) if rank not in taken]))
        depths.append(depths[parents[-1]] + 1)
    return parents, ranks
