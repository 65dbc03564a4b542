"""Draw the figures of the README and of `docs/how_it_works.md` from the package's own trees, walk and masks, and that of `docs/gpu.md`, if a GPU was measured.

Command: python tools/figures.py
"""

import json
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch

from transformers_falcon_spec.core.masks import block_causal_mask, block_ends
from transformers_falcon_spec.core.tree import DraftTree
from transformers_falcon_spec.core.verification import TokenTree, match_tokens

FOLDER = Path(__file__).parents[1] / "docs" / "figures"
GPU = Path(__file__).parents[1] / "benchmarks" / "results" / "gpu.json"
WORDS = ["cat", "sat", "ran", "down", "on", "away", "."]  # the tokens of the nodes, and the bonus token
TREE = DraftTree.from_lists([-1, 0, 0, 1, 1, 2])
MIDDLES = [(165, 60), (95, 140), (240, 140), (50, 220), (140, 220), (240, 220)]  # the middle of each node
CHOICES = {0: 1, 1: 3, 3: 6}  # the target's next token after each node that it is asked at
TEXT = ["once", "upon", "a", "time", "a", "cat", "sat"]
DRAFT = ["on", "a", "mat"]

INK, PALE, GRID = "#1f2937", "#6b7280", "#d1d5db"
SEEN, AHEAD, KEPT, BONUS, ROOT = "#93c5fd", "#fdba74", "#bbf7d0", "#fde68a", "#e0e7ff"


def box(middle: tuple[float, float], size: tuple[float, float], fill: str = "#ffffff", edge: str = PALE) -> str:
    """A rectangle around a point."""
    (x, y), (width, height) = middle, size
    return (
        f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}" rx="4" '
        f'fill="{fill}" stroke="{edge}"/>'
    )


def label(middle: tuple[float, float], words: str, colour: str = INK, anchor: str = "middle", size: int = 14) -> str:
    """Words at a point."""
    x, y = middle
    return f'<text x="{x:g}" y="{y + 5:g}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def line(start: tuple[float, float], end: tuple[float, float], colour: str = PALE, width: float = 1.5) -> str:
    """A straight line."""
    return f'<line x1="{start[0]:g}" y1="{start[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" stroke="{colour}" stroke-width="{width:g}"/>'


def figure(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole picture; its ground is white, so that it can be read on pages of any colour."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def grid(corner: tuple[float, float], fills: list[list[str]], cell: float = 28) -> list[str]:
    """A matrix of coloured cells; empty ones are white."""
    x, y = corner
    return [
        box((x + (column + 0.5) * cell, y + (row + 0.5) * cell), (cell - 2, cell - 2), fill or "#ffffff", GRID)
        for row, line_ in enumerate(fills)
        for column, fill in enumerate(line_)
    ]


def tree_parts(fills: dict[int, str], thick: set[int]) -> list[str]:
    """The tree: `fills` colours nodes, edges to the nodes in `thick` are drawn bold."""
    parents = TREE.parents[0].tolist()
    edges = [
        line(MIDDLES[parent], MIDDLES[node], INK if node in thick else GRID, 3 if node in thick else 1.5)
        for node, parent in enumerate(parents)
        if parent >= 0
    ]
    nodes = [
        part
        for node, middle in enumerate(MIDDLES)
        for part in (box(middle, (64, 30), fills.get(node, "#ffffff")), label(middle, WORDS[node]))
    ]
    return edges + nodes


def walk() -> str:
    """One step: the tree, what the target chose on its way, and the text that it makes."""
    accepted = match_tokens(TokenTree(TREE.parents[0].tolist(), range(len(MIDDLES))), CHOICES.__getitem__)
    fills = {0: ROOT} | dict.fromkeys(accepted.path[1:], KEPT)
    parts = [label((165, 22), "1. the drafter proposes a tree", PALE), *tree_parts(fills, set(accepted.path))]
    parts += [label((320, 22), "2. the target reads it in one forward: its own choices", PALE, "start")]

    for row, (node, choice) in enumerate(zip(accepted.path, accepted.token_ids, strict=True)):
        ending = "a child holds it: go on there" if choice in accepted.path else "no child holds it: the step ends"
        y = 58 + 46 * row
        parts += [
            label((320, y), f"after “{WORDS[node]}”", anchor="start"),
            label((426, y), "→", PALE),
            box((475, y), (64, 30), KEPT if choice in accepted.path else BONUS),
            label((475, y), WORDS[choice]),
            label((520, y), ending, PALE, "start", 13),
        ]

    strip = [("the", "#ffffff"), ("cat", ROOT)]
    strip += [(WORDS[choice], KEPT if choice in accepted.path else BONUS) for choice in accepted.token_ids]
    parts.append(label((320, 202), "3. its choices are the text: three tokens in one step", PALE, "start"))
    for index, (word, fill) in enumerate(strip):
        parts += [box((352 + 70 * index, 236), (64, 30), fill), label((352 + 70 * index, 236), word)]
    for index, (fill, words) in enumerate(
        [(ROOT, "newest token"), (KEPT, "guess that is kept"), (BONUS, "bonus token")]
    ):
        parts += [
            box((40 + 160 * index, 270), (16, 16), fill),
            label((56 + 160 * index, 270), words, PALE, "start", 13),
        ]

    return figure(740, 290, "One step: propose, verify, and the text that it makes", parts)


def tree_mask() -> str:
    """A tree beside the row in which it is laid out, and what each node sees."""
    words, cell, x, y = WORDS[: len(MIDDLES)], 34, 500, 80
    fills = [[SEEN if seen else "" for seen in row] for row in TREE.ancestor_mask[0].tolist()]
    parts = [label((165, 22), "the tree", PALE), *tree_parts({0: ROOT}, set())]
    parts += [label((540, 22), "who sees whom", PALE)]
    parts += grid((x - cell, y), [[SEEN]] * len(words), cell) + grid((x, y), fills, cell)
    parts.append(label((x - cell / 2, y - 14), "text", PALE, size=12))

    for node, word in enumerate(words):
        middle = (node + 0.5) * cell
        parts += [
            label((x + middle, y - 14), word, size=12),
            label((x - cell - 10, y + middle), word, anchor="end", size=13),
            label((x - cell - 62, y + middle), f"n + {TREE.depths[0, node]}", PALE, "end", 13),
        ]

    parts.append(label((x - cell - 62, y - 14), "position", PALE, "end", 12))
    return figure(740, 310, "A draft tree and its attention mask", parts)


def block_mask(block_size: int, corner: tuple[float, float]) -> list[str]:
    """What each row sees in blocks of a size that end at the newest row, and what the last rows draft."""
    rows, cell, (x, y) = torch.arange(len(TEXT)), 30, corner
    ends = block_ends(rows, block_size, torch.tensor(len(TEXT) % block_size))
    seen = block_causal_mask(ends, rows).tolist()
    fills = [
        [(AHEAD if column > row else SEEN) if sees else "" for column, sees in enumerate(line_)]
        for row, line_ in enumerate(seen)
    ]
    parts = grid(corner, fills, cell)

    for row, word in enumerate(TEXT):
        parts += [label((x - 8, y + (row + 0.5) * cell), word, anchor="end", size=13)]
        parts += [label((x + (row + 0.5) * cell, y - 12), word, size=11)]

    right = x + len(TEXT) * cell
    for index in range(block_size):
        middle = y + (len(TEXT) - block_size + index + 0.5) * cell
        parts += [label((right + 14, middle), "→", PALE)]
        parts += [box((right + 54, middle), (50, 24), KEPT), label((right + 54, middle), DRAFT[index], size=13)]

    return parts


def block() -> str:
    """Drafting token by token beside drafting a block in one pass."""
    parts = [label((165, 22), "k = 1: one token a pass", PALE), *block_mask(1, (60, 66))]
    parts += [label((530, 22), "k = 3: three tokens a pass", PALE), *block_mask(3, (425, 66))]
    for x, fill, words in [
        (60, SEEN, "sees"),
        (150, AHEAD, "sees ahead, in its own block"),
        (385, KEPT, "drafted in this pass"),
    ]:
        parts += [box((x, 306), (16, 16), fill), label((x + 16, 306), words, PALE, "start", 13)]

    return figure(740, 330, "Causal mask and relaxed causal mask of blocks", parts)


def gpu(result: dict[str, Any]) -> str:
    """Tokens a second of the ways in the first cell of `benchmarks/gpu.py`."""
    cell = result["cells"][0]
    most = max(row["tokens_per_second_interval"][1] for row in cell["rows"])
    where = f"{result['provenance']['device']}, shape {cell['shape']}, {cell['decoding']}"
    parts = [label((20, 22), where, PALE, "start")]

    for index, row in enumerate(cell["rows"]):
        y, length = 56 + 34 * index, 330 * row["tokens_per_second"] / most
        low, high = (330 + 330 * end / most for end in row["tokens_per_second_interval"])
        fill = GRID if row["way"].startswith("plain") else KEPT
        parts += [label((320, y), row["way"], anchor="end", size=13), box((330 + length / 2, y), (length, 22), fill)]
        parts += [line((low, y), (high, y), INK), label((700, y), f"{row['tokens_per_second']:.1f}", size=13)]

    parts.append(label((330, 56 + 34 * len(cell["rows"])), "tokens a second, with 95 % intervals", PALE, "start", 13))
    return figure(
        740, 80 + 34 * len(cell["rows"]), "Tokens a second of plain decoding and of the embedded drafter", parts
    )


FIGURES = {"walk.svg": walk, "tree_mask.svg": tree_mask, "block.svg": block}
if GPU.is_file():  # else no GPU was measured
    FIGURES["gpu.svg"] = partial(gpu, json.loads(GPU.read_text(encoding="utf-8")))


def main() -> None:
    """Write the figures."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print((FOLDER / name).relative_to(FOLDER.parents[1]))


if __name__ == "__main__":
    main()
