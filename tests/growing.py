"""The naive twin of trees that grow: paths in lists, everything sorted anew."""

from collections.abc import Callable, Sequence

Path = tuple[int, ...]


def grown_paths(
    model: Callable[[Path, int], Sequence[float]], depth: int, top_k: int, num_nodes: int, block_size: int = 1
) -> list[Path]:
    """Tokens from the root to each node of an Eagle-2 tree: `top_k` nodes of a depth grow `top_k` children each.

    `model` says what follows a path whose last so many tokens stand in a block that was drafted at once. Fewer nodes start
    blocks, as many as hold about `top_k` tokens, two at least. Likeliest first, as the fast one has them.
    """
    considered: list[tuple[Path, float]] = [((), 1.0)]
    newest = considered
    for level in range(depth):
        offset = level % block_size
        num = top_k if offset else max(top_k // block_size, 2)
        likeliest = sorted(newest, key=lambda node: -node[1])[:num]
        newest = []
        for path, prob in (node for node in considered if node in likeliest):
            probs = model(path, offset)
            best = sorted(range(len(probs)), key=lambda token: -probs[token])[:top_k]
            newest += [((*path, token), prob * probs[token]) for token in best]
        considered = considered + newest
    return [path for path, _ in sorted(considered, key=lambda node: -node[1])[:num_nodes]]
