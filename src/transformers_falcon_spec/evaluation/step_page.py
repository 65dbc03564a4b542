"""One HTML page of the trees of a text's steps: what was drafted, how likely it seemed, and what was kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .pages import render
from .steps import Step


@dataclass(frozen=True)
class WatchedText:
    """A text whose steps were watched.

    Args:
        prompt (`str`): What it answers.
        text (`str`): What was written.
        steps (`Sequence[Step]`): Its steps.
    """

    prompt: str
    text: str
    steps: Sequence[Step]


def render_step_page(texts: Sequence[WatchedText], provenance: dict[str, Any]) -> str:
    """One HTML file that needs nothing else; what comes from models and prompts is escaped."""
    shown = [
        {"prompt": text.prompt, "text": text.text, "steps": [_entry(step) for step in text.steps]} for text in texts
    ]
    steps = [step for text in texts for step in text.steps]
    num_accepted = sum(step.num_accepted for step in steps)
    context = {
        "texts": shown,
        "num_steps": len(steps),
        "acceptance_length": 1 + num_accepted / len(steps) if steps else 1.0,
        "provenance": provenance,
    }
    return render("steps.html", context)


def render_tree(step: Step) -> str:
    """The tree of one step as a part of a page that has `tree_style`; what comes from models is escaped."""
    return render("tree.html", {"entry": _entry(step)})


def tree_style() -> str:
    """The style of trees; the page sets the colours `--dim`, `--line`, `--panel` and `--identical`."""
    return render("tree.css", {})


def _entry(step: Step) -> dict[str, Any]:
    """A step with its nodes in the order in which nested lists hold them; the bonus token is a node, too.

    `closes` says how many lists end after a node without children.
    """
    children: dict[int, list[int]] = {}
    for number, node in enumerate(step.nodes[1:], start=1):
        children.setdefault(node.parent, []).append(number)
    nodes: list[dict[str, Any]] = []
    waiting = [(0, 0)]  # nodes still to come, the next one last, and the lists that end with each
    while waiting:
        number, num_ended = waiting.pop()
        below = [] if number < 0 else list(children.get(number, []))
        below += [-1] if number == step.last_kept and step.bonus is not None else []
        shown = {"kind": "bonus", "text": step.bonus} if number < 0 else _node(step, number)
        nodes.append({**shown, "opens": bool(below), "closes": num_ended})
        ends = [0] * len(below)
        ends[-1:] = [num_ended + 1] * bool(below)
        waiting += list(zip(below, ends, strict=True))[::-1]
    return {"step": step, "nodes": nodes}


def _node(step: Step, number: int) -> dict[str, Any]:
    node = step.nodes[number]
    kind = "root" if number == 0 else "kept" if node.is_kept else "left"
    return {"kind": kind, "text": node.text, "chance": node.chance, "token_id": node.token_id}
