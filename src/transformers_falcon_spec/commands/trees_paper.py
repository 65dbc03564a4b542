"""`falcon-spec trees paper`: write the static tree that the Falcon paper shows for two tokens a pass, as a baseline.

It is the tree of figure 6 in arXiv 2412.12639: 118 drafted nodes, with 20, 19, 19, 15, 16, 10, 10 and 9 at depths 1 to
8, in four passes of two tokens. A drafter with another block size needs as many passes as the depth takes.

Example:
  falcon-spec trees paper --output paper.json
  falcon-spec trees show paper.json
  falcon-spec generate --target TARGET --drafter DRAFTER --draft_tree paper.json --prompt "What is 2 + 3?"
"""

import json
from dataclasses import dataclass
from pathlib import Path

from ..drafters.falcon import PAPER_DEPTH, paper_tree
from .options import option


@dataclass(kw_only=True)
class PaperTreeCommand:
    """The file of the tree."""

    output: str = option("JSON file to write.")


def run(command: PaperTreeCommand) -> None:
    """Write the tree."""
    tree = paper_tree()
    Path(command.output).write_text(json.dumps(tree.to_json()) + "\n", encoding="utf-8")
    print(f"{command.output} holds a tree of {len(tree)} nodes, root included, and depth {PAPER_DEPTH}")
