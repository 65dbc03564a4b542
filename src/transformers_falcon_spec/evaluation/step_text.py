"""Draft trees as text in the terminal."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text
from rich.tree import Tree

from .steps import Step, StepNode

ACCEPTED, REJECTED, BONUS = "✓", "·", "+"


def drawn_tree(parents: Sequence[int], labels: Sequence[Text]) -> Tree:
    """A tree of labelled nodes, the root first."""
    branches = [Tree(labels[0])]
    for parent, label in zip(parents[1:], labels[1:], strict=True):
        branches.append(branches[parent].add(label))
    return branches[0]


def step_text(number: int, step: Step) -> Group:
    """A step as a title and its tree, in which marks tell accepted nodes, rejected ones and the bonus token apart."""
    title = f"Step {number}: {step.num_accepted} of {step.num_drafted} drafted nodes kept"
    title += f" ({step.num_lookahead} lookahead nodes were read, too)" if step.num_lookahead else ""
    parents, labels = [node.parent for node in step.nodes], [_label(node) for node in step.nodes]
    if step.bonus is not None:
        parents.append(step.last_accepted)
        labels.append(Text(f"{BONUS} {step.bonus} the target's own", style="italic"))
    return Group(Text(title), drawn_tree(parents, labels))


def _label(node: StepNode) -> Text:
    if node.parent < 0:
        return Text(node.text)
    mark, style = (ACCEPTED, "bold") if node.is_accepted else (REJECTED, "dim")
    prob = "" if node.prob is None else f" {node.prob:.2f}"
    return Text(f"{mark} {node.text}{prob}", style=style)
