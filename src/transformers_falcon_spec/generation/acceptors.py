"""Who decides which tokens of a draft become text: the host, or the first of several processes for the others.

Where a step is captured, the device does: [`DeviceAcceptor`] has the same `accept`.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from torch import Tensor

from ..core.verification import AcceptedPath, TokenTree
from .distributed import Decision, Processes
from .drafting import Draft
from .sequence_batch import SequenceBatch
from .sequence_state import NodeScores
from .verifier import TOKEN_MATCHING, AcceptedStep, StepCounts, Verifier, accepted_path, check_read, trees_of


class HostAcceptor:
    """The host scores the nodes of each row, asks the verifier, and writes what it accepts."""

    def __init__(self, batch: SequenceBatch, verifier: Verifier, processes: Processes) -> None:
        self._batch = batch
        self._verifier = verifier
        self._processes = processes

    def accept(self, draft: Draft, logits: Tensor, may_be_spoiled: Sequence[bool]) -> AcceptedStep:
        """Accept a part of `draft`, of which the target gave `logits` `[rows, nodes, vocab]`, and write it.

        Raises:
            [`SpoiledReadError`]: a row that `may_be_spoiled` holds NaN. Nothing was written then.
        """
        check_read(logits, may_be_spoiled)
        batch = self._batch
        is_open = batch.is_open  # before any row grows: one that had ended when the trees were read was not read for
        trees = trees_of(draft, self._verifier, is_open, batch.probs_device)
        rows = zip(batch.rows, trees, logits, strict=True)
        scores = [NodeScores(row, tree, of_row, batch.probs_device) for row, tree, of_row in rows]
        paths = self._written(trees, scores, list(compress(range(len(trees)), is_open)))

        counts = []
        for row, tree in enumerate(trees):
            parents = tree.parents
            if draft.is_lookahead is not None:  # such nodes count, too
                parents = draft.parents.expand_as(draft.token_ids)[row].tolist()
            num_nodes = 1 + len(parents) - parents.count(-1)
            counts.append(StepCounts(num_nodes, max(tree.depths)))

        return AcceptedStep(paths, counts)

    def _written(self, trees: Sequence[TokenTree], scores: Any, rows: Sequence[int]) -> list[AcceptedPath]:
        """The path of each row that became text: written at once, or token by token where the next one needs that."""
        batch = self._batch
        paths = [AcceptedPath()] * len(trees)
        for together in [rows] if batch.is_lockstep else [[row] for row in rows]:
            nodes = dict.fromkeys(together, 0)
            while nodes:
                for row, path in batch.emit(self._accepted(nodes, scores), scores).items():
                    paths[row] += path
                nodes = self._next_nodes(nodes, trees, paths)

        if self._processes.num > 1:
            self._processes.broadcast(batch.decision(paths))
        return paths

    def _accepted(self, nodes: Mapping[int, int], scores: Sequence[NodeScores]) -> dict[int, AcceptedPath]:
        """The path that each row accepts, given the node at which it stands. No text changes, only draws are taken."""
        is_lockstep = self._batch.is_lockstep
        if is_lockstep:
            self._batch.score_together(nodes, scores)
        accepted = {}
        for row, node in nodes.items():
            accepted[row] = accepted_path(self._verifier, scores[row], node, is_lockstep)
        return accepted

    def _next_nodes(
        self, nodes: Mapping[int, int], trees: Sequence[TokenTree], paths: Sequence[AcceptedPath]
    ) -> dict[int, int]:
        """The node at which each open row goes on, where rows are written token by token; empty if a row has none."""
        if not self._verifier.is_token_matching:
            return {}

        held = {}
        for row in nodes:
            if self._batch.has_ended(row):
                continue

            child = trees[row].child(paths[row].path[-1], paths[row].token_ids[-1])
            if child is None:
                return {}

            held[row] = child

        return held


class FollowingAcceptor(HostAcceptor):
    """Writes what the first process has accepted."""

    def __init__(self, batch: SequenceBatch, _verifier: Verifier, processes: Processes) -> None:
        super().__init__(batch, TOKEN_MATCHING, processes)  # which needs no probabilities of a draft

    def _written(self, trees: Sequence[TokenTree], scores: Any, rows: Sequence[int]) -> list[AcceptedPath]:  # noqa: ARG002
        return self._batch.follow(self._processes.broadcast(Decision()), scores)
