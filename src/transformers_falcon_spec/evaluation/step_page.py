"""The HTML page of draft trees: the tokens of each step, their probabilities, and which were accepted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .pages import render
from .steps import Step


@dataclass(frozen=True)
class ObservedText:
    """A prompt, the text that answers it, and the steps of the text."""

    prompt: str
    text: str
    steps: Sequence[Step]


def render_step_page(texts: Sequence[ObservedText], provenance: dict[str, Any]) -> str:
    """The page as one HTML file that needs nothing else."""
    shown = [{**vars(text), "steps": [_entry(step) for step in text.steps]} for text in texts]
    steps = [step for text in texts for step in text.steps]
    length = 1 + sum(step.num_accepted for step in steps) / max(len(steps), 1)
    context = {"texts": shown, "num_steps": len(steps), "acceptance_length": length, "provenance": provenance}
    return render("steps.html", context)


def render_tree(step: Step) -> str:
    """The tree of one step, for a page that has the style `tree_style`."""
    return render("tree.html", {"entry": _entry(step)})


def tree_style() -> str:
    """The style of trees; the page sets the colours `--dim`, `--line`, `--panel` and `--identical`."""
    return render("tree.css", {})


def _entry(step: Step) -> dict[str, Any]:
    """A step with its nodes, bonus token included, in the order of nested lists.

    A node that `opens` a list has children; `closes` is the number of lists that end after a node without.
    """
    children: dict[int, list[int]] = {number: [] for number in range(-1, len(step.nodes))}  # -1: the bonus token
    for number, node in enumerate(step.nodes[1:], start=1):
        children[node.parent].append(number)
    children[step.last_accepted] += [-1] * (step.bonus is not None)
    waiting, order = [(0, 0)], []  # nodes with their depths
    while waiting:
        number, depth = waiting.pop()
        order.append((number, depth))
        waiting += [(child, depth + 1) for child in reversed(children[number])]
    nodes = [
        {**_node(step, number), "opens": below > depth, "closes": max(depth - below, 0)}
        for (number, depth), (_, below) in zip(order, [*order[1:], (0, 0)], strict=True)
    ]
    return {"step": step, "nodes": nodes}


def _node(step: Step, number: int) -> dict[str, Any]:
    if number < 0:
        return {"kind": "bonus", "text": step.bonus}
    node = step.nodes[number]
    kind = "root" if number == 0 else "kept" if node.is_accepted else "left"
    return {"kind": kind, "text": node.text, "prob": node.prob, "token_id": node.token_id}
