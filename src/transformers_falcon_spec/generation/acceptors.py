"""How a part of a draft becomes text: its trees, the target's scores after their nodes, and who decides.

The host decides, or the first of several processes for the others. Where a step is captured, the device does:
[`DeviceAcceptor`] has the same `accept`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ..core.sampling import GeneratorDraws, choose
from ..core.verification import AcceptedPath, DrawnTree, TokenTree, match_tokens
from ..errors import GenerationError, OptionError
from .distributed import Decision, Processes
from .drafting import Draft
from .sequence_batch import SequenceBatch, SequenceState, TokenScores
from .verifier import BUILT_IN, TOKEN_MATCHING, Verifier


class NodeScores:
    """The target's scores and choices after the nodes of one row's tree, computed when a verifier asks for them.

    `logits` `[nodes, vocab]` are the target's, and drawn tokens are verified on `probs_device`.
    """

    def __init__(self, sequence: SequenceState, tree: TokenTree, logits: Tensor, probs_device: torch.device) -> None:
        self.sequence = sequence
        self.tree = tree
        self.draws = sequence.draws
        self.logits = logits
        self._probs_device = probs_device
        self._text_ids = sequence.input_ids
        self.by_node: dict[int, TokenScores] = {}  # those that are computed
        self._chosen: list[int] = []  # the target's token after every node, where all were chosen at once
        self.keeps_draw_states = False  # for a rule that draws more tokens than may become text
        self._draw_states: dict[int, Any] = {}  # by node: of the draws once the token after it is drawn

    @property
    def is_on_accelerator(self) -> bool:
        """Whether the scores are, so that choosing after all nodes at once is faster than one by one."""
        return self.logits.device.type != "cpu"

    def after(self, node: int) -> TokenScores:
        """The scores after a node; the processors see the text up to it."""
        if node not in self.by_node:
            path = self.tree.path_to(node)[1:]  # the root is part of the text already
            drafted = self._text_ids.new_tensor([[self.tree.token_ids[above] for above in path]])
            ids = torch.cat([self._text_ids, drafted], dim=-1)
            self.by_node[node] = self.sequence.process(ids, self.logits[node : node + 1])
        return self.by_node[node]

    def token_after(self, node: int) -> int:
        """The target's own token after a node: the best one or, when sampling, the next draw.

        When sampling each call draws: ask once for a node, the root first, and for accepted nodes only.
        """
        if self._chosen:
            return self._chosen[node]
        if self.sequence.takes_best:
            return int(self.logits[node].float().argmax())  # as Transformers, which rounds logits in float64

        token = int(choose(self.after(node).processed, self.sequence.do_sample, self.draws))
        if self.keeps_draw_states:
            self._draw_states[node] = self.draws.get_state(self._text_ids.device)
        return token

    def probs_after(self, node: int) -> Tensor:
        """The target's distribution `[vocab]` after a node."""
        return torch.softmax(self.after(node).processed, dim=-1)[0].to(self._probs_device)

    def choose_all(self, start: int = 0) -> None:
        """Choose the token after every node at once, `start` being drawn for first; nothing may depend on the text."""
        raw, scores = self.sequence.process(self.sequence.input_ids, self.logits)
        if self.sequence.do_sample:
            assert isinstance(self.draws, GeneratorDraws)  # `can_choose_ahead` says so
            depths = [max(depth - self.tree.depths[start], 0) for depth in self.tree.depths]
            chosen, states = self.draws.categorical_by_depth(torch.softmax(scores, dim=-1), torch.tensor(depths))
            self._draw_states = {node: states[depth] for node, depth in enumerate(depths)}
        else:
            chosen = scores.argmax(dim=-1)

        self._chosen = chosen.tolist()  # waits for the device once
        pairs = zip(raw.split(1), scores.split(1), strict=True)
        self.by_node = {node: TokenScores(*pair) for node, pair in enumerate(pairs)}

    def settle_draws(self, node: int) -> None:
        """Put the draws where they are once the token after a node of the path is drawn, if more were drawn ahead."""
        if node in self._draw_states:
            self.draws.set_state(self._draw_states[node], self._text_ids.device)

    def is_settled(self, node: int) -> bool:
        """Whether the draws are still there, so that later tokens of the path are those that plain decoding draws."""
        return node not in self._draw_states or self.draws.is_at(self._draw_states[node], self._text_ids.device)


@dataclass(frozen=True)
class StepCounts:
    """What the statistics need to know of a row's step."""

    num_nodes: int  # of the draft, root and lookahead nodes included
    max_depth: int  # of nodes that may become text


@dataclass(frozen=True)
class AcceptedStep:
    """The outcome of a step; every list has one entry for each row."""

    paths: Sequence[AcceptedPath]  # that became text
    counts: Sequence[StepCounts]


class SpoiledReadError(Exception):
    """A node that overflowed spoiled what the target says after others: its weight is 0 there, but 0 x NaN is NaN."""


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
        if logits.shape[1] > 1:  # roots alone are what they are
            has_nan = logits[..., 0].isnan().any(-1).tolist()
            if any(compress(has_nan, may_be_spoiled)):
                raise SpoiledReadError

        batch = self._batch
        is_open = batch.is_open  # before any row grows: one that had ended when the trees were read was not read for
        trees = trees_of(draft, self._verifier, is_open, batch.probs_device)

        scores = []
        for sequence, tree, of_row in zip(batch.rows, trees, logits, strict=True):
            scores.append(NodeScores(sequence, tree, of_row, batch.probs_device))
        paths = self._write(scores, list(compress(range(len(trees)), is_open)))
        if self._processes.num > 1 and self._processes.is_first:
            self._processes.broadcast(batch.decision(paths))

        counts = []
        for row, tree in enumerate(trees):
            parents = tree.parents
            if draft.is_lookahead is not None:  # such nodes count, too
                parents = draft.parents.expand_as(draft.token_ids)[row].tolist()
            num_nodes = 1 + len(parents) - parents.count(-1)
            counts.append(StepCounts(num_nodes, max(tree.depths)))

        return AcceptedStep(paths, counts)

    def _write(self, scores: Sequence[NodeScores], rows: Sequence[int]) -> list[AcceptedPath]:
        """Write what each of these open rows accepts: at once, or token by token where the next one needs the text."""
        paths = [AcceptedPath()] * len(scores)
        for row in rows:
            node: int | None = 0
            while node is not None:
                accepted = accepted_path(self._verifier, scores[row], node)
                paths[row] += self._batch.emit({row: accepted}, scores)[row]

                node = None
                if self._verifier.is_token_matching and not self._batch.has_ended(row):
                    node = scores[row].tree.child(paths[row].path[-1], paths[row].token_ids[-1])

        return paths


class LockstepAcceptor(HostAcceptor):
    """Writes all rows token by token, for processors and criteria that are shown all rows together."""

    def _write(self, scores: Sequence[NodeScores], rows: Sequence[int]) -> list[AcceptedPath]:
        paths = [AcceptedPath()] * len(scores)
        nodes = dict.fromkeys(rows, 0)
        while nodes:
            self._batch.score_together(nodes, scores)
            tokens = {}
            for row, node in nodes.items():
                token_id = scores[row].token_after(node)
                tokens[row] = (node, token_id)
                paths[row] += AcceptedPath((node,), (token_id,))
            self._batch.emit_together(tokens, scores)

            nodes = {}
            for row, (node, token_id) in tokens.items():
                if self._batch.has_ended(row):
                    continue

                child = scores[row].tree.child(node, token_id)
                if child is None:  # the row waits for the next step, and the others with it
                    nodes = {}
                    break

                nodes[row] = child

        return paths


class FollowingAcceptor(HostAcceptor):
    """Writes what the first process has accepted."""

    def __init__(self, batch: SequenceBatch, _verifier: Verifier, processes: Processes) -> None:
        super().__init__(batch, TOKEN_MATCHING, processes)  # which needs no probabilities of a draft

    def _write(self, scores: Sequence[NodeScores], rows: Sequence[int]) -> list[AcceptedPath]:  # noqa: ARG002
        return self._batch.follow(self._processes.broadcast(Decision()), scores)


def trees_of(draft: Draft, verifier: Verifier, is_open: Sequence[bool], device: torch.device) -> list[TokenTree]:
    """The draft of each row as the rule reads it; open rows with probabilities on `device` where it needs them."""
    parents = draft.parents.expand_as(draft.token_ids)
    if draft.is_lookahead is not None:  # nodes that are read, but never become text
        parents = parents.masked_fill(draft.is_lookahead.to(parents.device), -1)
    trees = list(map(TokenTree, parents.tolist(), draft.token_ids.tolist()))  # waits for the device once
    if not verifier.needs_draft_probs:
        return trees

    return [
        _drawn(tree, row, draft, verifier, device) if is_open[row] and not tree.is_root_alone else tree
        for row, tree in enumerate(trees)
    ]


def _drawn(tree: TokenTree, row: int, draft: Draft, verifier: Verifier, device: torch.device) -> DrawnTree:
    if draft.draft_probs is None or draft.dist_index is None or draft.is_lookahead is not None:
        raise OptionError(
            f'`verifier="{verifier.name}"` needs a draft that was drawn, with its distributions and without lookahead '
            f'nodes, but this drafter gives none. Set `drafter.generation_config.verifier = "{TOKEN_MATCHING.name}"`.'
        )

    probs: Tensor = draft.draft_probs[row].to(device)
    dist_index = draft.dist_index[min(row, len(draft.dist_index) - 1)].tolist()
    return DrawnTree(tree.parents, tree.token_ids, probs, dist_index)


def accepted_path(verifier: Verifier, scores: NodeScores, node: int) -> AcceptedPath:
    """The path that a row accepts from a node on; the next token alone where it must be text before another is."""
    # after a root alone all rules take its token
    if verifier.accept is not TOKEN_MATCHING.accept and not scores.tree.is_root_alone:
        scores.keeps_draw_states = verifier.keeps_seeded_text and scores.sequence.do_sample
        accepted = verifier.accept(scores)
        if verifier not in BUILT_IN:
            _check_accepted(verifier, accepted, scores)
        return accepted

    sequence = scores.sequence
    if not sequence.can_choose_ahead:
        return match_tokens(scores.tree, scores.token_after, node, max_tokens=1)

    if scores.is_on_accelerator:
        scores.choose_all(node)
    elif sequence.do_sample:
        return match_tokens(scores.tree, scores.token_after, node, max_tokens=1)
    return match_tokens(scores.tree, scores.token_after, node)


def _check_accepted(verifier: Verifier, accepted: Any, scores: NodeScores) -> None:
    """Raise an error unless a rule returned a path of the tree, with its tokens and a bonus token."""
    must = None
    if not isinstance(accepted, AcceptedPath):
        must = "an `AcceptedPath`"
    elif tuple(accepted.path[:1]) != (0,):
        must = "a path that begins at the root, node 0"
    elif len(accepted.token_ids) != len(accepted.path):
        must = "one token more than accepted ones: that after each node of `path`, the last being the bonus token"
    elif accepted.token_ids[-1] not in range(scores.logits.shape[-1]):
        must = "a bonus token of the target's vocabulary"
    else:
        steps = zip(accepted.path, accepted.token_ids, accepted.path[1:], strict=False)  # the last node has no child
        if any(scores.tree.child(node, token) != child for node, token, child in steps):
            must = "a path on which each node is a child of the last, and `token_ids[i]` the token of `path[i + 1]`"

    if must is not None:
        raise GenerationError(
            f"A verifier must return {must}, but `{verifier.name}` returned {accepted!r}. Mend the rule, or set "
            f'`drafter.generation_config.verifier = "{TOKEN_MATCHING.name}"`.'
        )
