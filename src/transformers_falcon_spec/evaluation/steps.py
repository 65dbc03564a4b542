"""Stores the steps of a text, and shows them in the terminal: trees and accepted tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text
from rich.tree import Tree
from transformers import PreTrainedTokenizerBase

from ..core.verification import AcceptedPath
from ..generation.drafting import Draft

ACCEPTED, REJECTED, BONUS = "✓", "·", "+"


@dataclass(frozen=True)
class StepNode:
    """A node of a draft tree."""

    parent: int  # index of its parent; -1 at the root
    token_id: int
    text: str  # the token alone, quoted, with escapes for what cannot be printed
    is_accepted: bool  # the root is accepted if anything is


@dataclass(frozen=True)
class Step:
    """A step of a text."""

    nodes: tuple[StepNode, ...]  # the root, which is the newest token before the step, and what was drafted
    num_lookahead: int  # lookahead nodes, which are not among `nodes`
    bonus: str | None  # the target's own token after the last accepted node, as text; None if there is none

    @property
    def num_drafted(self) -> int:
        """The number of nodes, without the root."""
        return len(self.nodes) - 1

    @property
    def num_accepted(self) -> int:
        """The number of accepted nodes, without root and bonus token."""
        return sum(node.is_accepted for node in self.nodes[1:])

    @property
    def last_accepted(self) -> int:
        """The node that the bonus token follows."""
        return max((number for number, node in enumerate(self.nodes) if node.is_accepted), default=0)


class StepLog:
    """Stores the steps of calls with one row; an observer for `observe_steps`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.steps: list[Step] = []

    def __call__(self, draft: Draft, accepted: Sequence[AcceptedPath]) -> None:
        """Store one step."""
        parents, token_ids = draft.parents[0].tolist(), draft.token_ids[0].tolist()
        is_lookahead = [False] * len(parents) if draft.is_lookahead is None else draft.is_lookahead[0].tolist()
        path = accepted[0].path
        numbers = {-1: -1}  # of nodes, among those that are shown
        nodes: list[StepNode] = []
        for node, parent in enumerate(parents):
            if node == 0 or (parent >= 0 and not is_lookahead[node]):
                numbers[node] = len(nodes)
                text = repr(self.tokenizer.decode([token_ids[node]]))
                nodes.append(StepNode(numbers[parent], token_ids[node], text, is_accepted=node in path))

        bonus = repr(self.tokenizer.decode([accepted[0].token_ids[-1]])) if path else None
        self.steps.append(Step(tuple(nodes), sum(is_lookahead), bonus))


def step_text(number: int, step: Step) -> Group:
    """A step as a title and its tree, with marks for accepted nodes, rejected ones and the bonus token."""
    title = f"Step {number}: {step.num_accepted} of {step.num_drafted} drafted nodes kept"
    title += f" ({step.num_lookahead} lookahead nodes were read, too)" if step.num_lookahead else ""
    branches = [Tree(Text(step.nodes[0].text))]
    for node in step.nodes[1:]:
        mark, style = (ACCEPTED, "bold") if node.is_accepted else (REJECTED, "dim")
        branches.append(branches[node.parent].add(Text(f"{mark} {node.text}", style=style)))

    if step.bonus is not None:
        branches[step.last_accepted].add(Text(f"{BONUS} {step.bonus} the target's own", style="italic"))

    return Group(Text(title), branches[0])
