"""Draws the steps of a text for the terminal: trees, probabilities, accepted tokens."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text
from rich.tree import Tree
from transformers import PreTrainedTokenizerBase

from ..core.verification import AcceptedPath
from ..generation.drafting import Draft

ACCEPTED, REJECTED, BONUS = "✓", "·", "+"


class StepLog:
    """Draws the steps of calls with one row; an observer for `observe_steps`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.steps: list[Group] = []  # each a title and a tree, with marks for accepted nodes and the bonus token

    def __call__(self, draft: Draft, accepted: Sequence[AcceptedPath]) -> None:
        """Draw one step; lookahead nodes, which bring no tokens, are counted and left out."""
        path = accepted[0].path
        new_ids = accepted[0].token_ids
        token_ids = draft.token_ids[0].tolist()
        is_lookahead = [False] * len(token_ids) if draft.is_lookahead is None else draft.is_lookahead[0].tolist()
        probs = None if draft.node_probs is None else draft.node_probs[0].tolist()

        branches = {0: Tree(Text(self._text(token_ids[0])))}
        for node, parent in enumerate(draft.parents[0].tolist()):
            if parent < 0 or is_lookahead[node]:  # the root, or a filler
                continue
            mark, style = (ACCEPTED, "bold") if node in path else (REJECTED, "dim")
            prob = "" if probs is None else f" {probs[node]:.2f}"
            label = Text(f"{mark} {self._text(token_ids[node])}{prob}", style=style)
            branches[node] = branches[parent].add(label)

        if new_ids:
            last = path[-1] if path else 0
            branches[last].add(Text(f"{BONUS} {self._text(new_ids[-1])} the target's own", style="italic"))

        title = f"Step {len(self.steps) + 1}: {max(len(path) - 1, 0)} of {len(branches) - 1} drafted nodes kept"
        if any(is_lookahead):
            title += f" ({sum(is_lookahead)} lookahead nodes were read, too)"
        self.steps.append(Group(Text(title), branches[0]))

    def _text(self, token_id: int) -> str:
        """A token alone, quoted, with escapes for what cannot be printed."""
        return repr(self.tokenizer.decode([token_id]))
