"""The naive twin of trees that grow: paths in lists, everything sorted anew."""

from collections.abc import Callable, Sequence

from tests.reference import Path


def grown_paths(model: Callable[[Path], Sequence[float]], depth: int, top_k: int, num_nodes: int) -> list[Path]:
    """Tokens from the root to each node of an Eagle-2 tree: `top_k` nodes of a depth grow `top_k` children each.

    In the order of depth, then of the parents, then of the children's probabilities, as the fast one has them.
    """
    considered: list[tuple[Path, float]] = [((), 1.0)]
    newest = considered
    for _ in range(depth):
        likeliest = sorted(newest, key=lambda node: -node[1])[:top_k]
        newest = []
        for path, chance in (node for node in considered if node in likeliest):
            probs = model(path)
            best = sorted(range(len(probs)), key=lambda token: -probs[token])[:top_k]
            newest += [((*path, token), chance * probs[token]) for token in best]
        considered = considered + newest
    kept = sorted(considered, key=lambda node: -node[1])[:num_nodes]
    return [path for path, chance in considered if (path, chance) in kept]
