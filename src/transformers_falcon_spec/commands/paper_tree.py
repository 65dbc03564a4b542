"""`falcon-spec trees paper`: write a static tree of the shape that the Falcon paper draws for two tokens a pass, as a baseline.

119 drafted nodes in eight depths of 20, 20, 19, 15, 16, 10, 10 and 9, four passes of two tokens: as many at each depth as figure 6 of
arXiv 2412.12639 shows. Which of the places at a depth are taken is not reported there; these are the ones with the least product of
(rank + 1) along the path. A drafter with blocks of another size needs as many passes as the depth takes.

Example:
  falcon-spec trees paper --output paper.json
  falcon-spec trees show paper.json
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..core.tree import DraftTree

WIDTHS = (20, 20, 19, 15, 16, 10, 10, 9)


@dataclass
class PaperTreeCommand:
    """Where the tree goes."""

    output: str = field(metadata={"help": "JSON file to write."})


def run(command: PaperTreeCommand) -> None:
    """Write the tree."""
    tree = paper_tree()
    Path(command.output).write_text(json.dumps(tree.to_json()) + "\n", encoding="utf-8")
    print(f"{command.output} holds a tree of {len(tree)} nodes, root included, and depth {len(WIDTHS)}")


def paper_tree() -> DraftTree:
    """The tree."""
    acceptance = 1 / torch.arange(1, max(WIDTHS) + 1, dtype=torch.double)
    return DraftTree.of_widths(acceptance.expand(len(WIDTHS), -1), WIDTHS)
