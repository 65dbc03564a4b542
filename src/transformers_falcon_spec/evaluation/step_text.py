"""Drafted trees in the terminal."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from .steps import Step, StepNode

KEPT, LEFT, BONUS = "✓", "·", "+"


def drawn(parents: Sequence[int], labels: Sequence[Text]) -> Tree:
    """A tree of labelled nodes, the root first."""
    branches = [Tree(labels[0])]
    for parent, label in zip(parents[1:], labels[1:], strict=True):
        branches.append(branches[parent].add(label))
    return branches[0]


def step_text(number: int, step: Step) -> Group:
    """One step: what happened, and its tree, with a mark before every node: kept, left, or the target's own."""
    title = f"Step {number}: {step.num_accepted} of {step.num_drafted} drafted nodes kept"
    title += f" ({step.num_guests} guests were read, too)" if step.num_guests else ""
    parents, labels = [node.parent for node in step.nodes], [_label(node) for node in step.nodes]
    if step.bonus is not None:
        parents.append(step.last_kept)
        labels.append(Text(f"{BONUS} {step.bonus} the target's own", style="italic"))
    return Group(Text(title), drawn(parents, labels))


def _label(node: StepNode) -> Text:
    if node.parent < 0:
        return Text(node.text)
    chance = "" if node.chance is None else f" {node.chance:.2f}"
    return Text(f"{KEPT if node.is_kept else LEFT} {node.text}{chance}", style="bold" if node.is_kept else "dim")
