"""`falcon-spec trees show`: print a static tree, from a JSON file or from a drafter's folder.

Examples:
  falcon-spec trees show models/falcon-reference
  falcon-spec trees show tree.json
"""

from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ..evaluation.steps import drawn_tree
from .loading import load_tree
from .options import option


@dataclass(kw_only=True)
class ShowTreeCommand:
    """The tree to show."""

    tree: str = option("JSON file, or folder of a drafter.", positional=True)


def run(command: ShowTreeCommand) -> None:
    """Print the tree."""
    tree, console = load_tree(command.tree), Console()
    depths = tree.depths[0].tolist()
    widths = ", ".join(str(depths.count(depth)) for depth in range(1, max(depths) + 1)) or "none"
    console.print(
        f"{len(tree)} nodes, root included; below it, by depth: {widths}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    labels = [Text("root" if rank < 0 else f"rank {rank}") for rank in tree.ranks[0].tolist()]
    console.print(drawn_tree(tree.parents[0].tolist(), labels))
