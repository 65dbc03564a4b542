"""Steps of a text as people look at them: the drafted tree with its tokens, how likely they seemed, and what was kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..core.verification import AcceptedPath
from ..generation.drafting import Draft


@dataclass(frozen=True)
class StepNode:
    """A node of a drafted tree.

    Args:
        parent (`int`): Index of its parent; -1 at the root.
        token_id (`int`): Its token.
        text (`str`): That token alone, quoted, with what cannot be printed escaped.
        chance (`float`, *optional*): The drafter's chance that the target takes it after its parent; None where the drafter says none.
        is_kept (`bool`): Whether it became text; the root is kept if anything was.
    """

    parent: int
    token_id: int
    text: str
    chance: float | None
    is_kept: bool


@dataclass(frozen=True)
class Step:
    """One step of a text.

    Args:
        nodes (`tuple[StepNode, ...]`): The root, the newest token of the text before the step, and what was drafted.
        num_guests (`int`): Tokens that were read beside the tree and could not be kept; they are not among the nodes.
        bonus (`str`, *optional*): The token that the target added itself after the last kept node, as text; None if none.
    """

    nodes: tuple[StepNode, ...]
    num_guests: int
    bonus: str | None

    @property
    def num_drafted(self) -> int:
        """Nodes without the root."""
        return len(self.nodes) - 1

    @property
    def num_accepted(self) -> int:
        """Drafted nodes that were kept, without root and bonus token."""
        return sum(node.is_kept for node in self.nodes[1:])

    @property
    def last_kept(self) -> int:
        """The node that the bonus token follows."""
        return max(number for number, node in enumerate(self.nodes) if node.is_kept or number == 0)


class StepLog:
    """Keeps the steps of calls of one row; given to `observe_steps`.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): What makes text of tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.steps: list[Step] = []

    def __call__(self, draft: Draft, verdicts: Sequence[AcceptedPath]) -> None:
        """Store one step."""
        parents, token_ids = draft.parents[0].tolist(), draft.token_ids[0].tolist()
        guests = [False] * len(parents) if draft.is_lookahead is None else draft.is_lookahead[0].tolist()
        chances = [None] * len(parents) if draft.node_probs is None else draft.node_probs[0].tolist()
        shown = [node for node, parent in enumerate(parents) if node == 0 or (parent >= 0 and not guests[node])]
        nodes = tuple(
            StepNode(
                parent=shown.index(parents[node]) if node else -1,
                token_id=token_ids[node],
                text=self._text(token_ids[node]),
                chance=chances[node] if node else None,
                is_kept=node in verdicts[0].path,
            )
            for node in shown
        )
        committed = verdicts[0].token_ids
        self.steps.append(Step(nodes, sum(guests), self._text(committed[-1]) if committed else None))

    def _text(self, token_id: int) -> str:
        return repr(self.tokenizer.decode([token_id]))
