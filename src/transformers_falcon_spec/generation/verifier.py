"""Verdicts over the trees of a step: each row's is judged by the rule of the call, and what it keeps becomes text at once."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ..core.rejection import DrawnTree, recursive_rejection, traversal_verification
from ..core.verification import AcceptedPath, Walk, lazy_walk
from ..errors import OptionError
from .distributed import SINGLE_PROCESS, Decision, Processes
from .drafting import Draft
from .sequence_batch import SequenceBatch
from .target import TargetOutput

REJECTION_RULES = {"recursive_rejection": recursive_rejection, "traversal": traversal_verification}
Tree = tuple[list[int], list[int]]  # parents and tokens of a row's nodes


class Judge:
    """The verifier of one call.

    Args:
        batch ([`SequenceBatch`]): The texts, which it writes.
        verifier (`str`): The rule, as `SpeculationConfig` names it.
        ranks ([`Processes`], *optional*): Processes that write the same texts; the first one judges, the others write what it kept.
    """

    def __init__(self, batch: SequenceBatch, verifier: str, ranks: Processes = SINGLE_PROCESS) -> None:
        self.batch, self.verifier, self.ranks = batch, verifier, ranks

    def begin(self, logits: Tensor) -> None:
        """The first token of every row, of the logits `[rows, 1, vocab]` after its prompt."""

        def choose() -> list[AcceptedPath]:
            if self.batch.is_in_step:
                chosen = self.batch.commit_in_step(dict(enumerate(logits)))
                return [AcceptedPath((0,), (token,)) for token in chosen.values()]
            tokens = [row.commit_token(logits[number]) for number, row in enumerate(self.batch.rows)]
            return [AcceptedPath((0,), (token,)) for token in tokens]

        self._decided(choose, logits)

    def __call__(
        self, draft: Draft, trees: Sequence[Tree], depths: Tensor, reading: TargetOutput
    ) -> list[AcceptedPath]:
        """Judge every row's tree; `depths` `[rows, nodes]` are those of the nodes. Rows that are closed keep nothing."""
        return self._decided(lambda: self._judged(draft, trees, depths, reading), reading.logits)

    def _decided(self, decide: Callable[[], list[AcceptedPath]], logits: Tensor) -> list[AcceptedPath]:
        """What the first rank decides; the others' texts follow it, from their own logits `[rows, nodes, vocab]` after each node."""
        rows = self.batch.rows
        if self.ranks.num == 1:
            return decide()
        if self.ranks.is_first:
            verdicts = decide()
            where = [row.draws.get_state(logits.device) for row in rows] if self.batch.is_drawn else []
            self.ranks.broadcast(Decision(verdicts, [row.is_complete for row in rows], where))
            return verdicts
        decision = self.ranks.broadcast(Decision([], [], []))
        if self.batch.is_in_step:
            self._follow_in_step(decision.verdicts, logits)
        for number, (row, verdict) in enumerate(zip(rows, decision.verdicts, strict=True)):
            if not self.batch.is_in_step:
                row.follow(verdict.token_ids, [logits[number, node][None] for node in verdict.path])
            row.is_complete = decision.is_complete[number]
            if decision.draws:
                row.draws.set_state(decision.draws[number], logits.device)
        return decision.verdicts

    def _follow_in_step(self, verdicts: list[AcceptedPath], logits: Tensor) -> None:
        """The same calls, in the same order, as the first rank makes."""
        for row in self.batch.rows:
            row.step_scores = []
        for place in range(max(len(verdict.token_ids) for verdict in verdicts)):
            going = {row: verdict for row, verdict in enumerate(verdicts) if place < len(verdict.token_ids)}
            said = {row: logits[row, verdict.path[place]][None] for row, verdict in going.items()}
            self.batch.commit_in_step(said, {row: verdict.token_ids[place] for row, verdict in going.items()})

    def _judged_in_step(self, draft: Draft, trees: Sequence[Tree], logits: Tensor) -> list[AcceptedPath]:
        """All rows walk together, and as far as each of them finds its token in its tree."""
        walks = {}
        for row, (parents, token_ids) in enumerate(trees):
            self.batch.rows[row].step_scores = []
            if not self.batch.is_closed(row):
                walks[row] = Walk(parents, token_ids, _guests(draft, row))
        going, can_go_on = dict(walks), True
        while going and can_go_on:
            tokens = self.batch.commit_in_step({row: logits[row, walk.node][None] for row, walk in going.items()})
            finds = {row: walk.take(tokens[row]) for row, walk in going.items()}
            going = {row: walk for row, walk in going.items() if not self.batch.is_closed(row)}
            can_go_on = all(finds[row] for row in going)
        return [walks[row].verdict if row in walks else AcceptedPath((), ()) for row in range(len(trees))]

    def _judged(
        self, draft: Draft, trees: Sequence[Tree], depths: Tensor, reading: TargetOutput
    ) -> list[AcceptedPath]:
        if self.batch.is_in_step:
            return self._judged_in_step(draft, trees, reading.logits)
        # settled before any row grows: one that had ended when the trees were read was not read for, even if others outgrow it now
        is_closed = [self.batch.is_closed(row) for row in range(len(trees))]
        verdicts = []
        for row, (parents, token_ids) in enumerate(trees):
            self.batch.rows[row].step_scores = []
            if is_closed[row]:
                verdicts.append(AcceptedPath((), ()))
            elif self.verifier in REJECTION_RULES and max(parents) >= 0:
                verdicts.append(self._by_rejection(row, draft, parents, token_ids, reading))
            else:
                commit = self._committer(row, reading.logits[row], depths[row])
                verdicts.append(lazy_walk(parents, token_ids, commit, _guests(draft, row)))
        return verdicts

    def _committer(self, row: int, logits: Tensor, depths: Tensor) -> Callable[[int], tuple[int, bool]]:
        """Given a node, commits the target's token after it; returns it and whether the row is closed."""
        transcript = self.batch.rows[row]
        if logits.device.type != "cpu" and transcript.can_choose_ahead:
            commit = transcript.choose_ahead(logits, depths)
        else:
            commit = lambda node: transcript.commit_token(logits[node : node + 1])  # noqa: E731
        return lambda node: (commit(node), self.batch.is_closed(row))

    def _by_rejection(
        self, row: int, draft: Draft, parents: list[int], token_ids: list[int], reading: TargetOutput
    ) -> AcceptedPath:
        """What a rejection rule keeps of drawn tokens; it becomes text afterwards."""
        if draft.draft_probs is None or draft.dist_index is None or draft.is_lookahead is not None:
            raise OptionError(
                f'`verifier="{self.verifier}"` needs a draft that was drawn, with its distributions and without guests, but this '
                'drafter gives none. Set `drafter.generation_config.verifier = "lazy_walk"`.'
            )
        transcript = self.batch.rows[row]
        dist_index = draft.dist_index[min(row, len(draft.dist_index) - 1)].tolist()
        place = "cpu" if len(self.batch) == 1 else transcript.input_ids.device  # where generators of rows are
        tree = DrawnTree(parents, token_ids, draft.draft_probs[row].to(place), dist_index)

        def target_probs(node: int) -> Tensor:
            drafted = tuple(token_ids[above] for above in tree.path_to(node)[1:])
            return transcript.probs_after(drafted, reading.logits[row, node][None]).to(place)

        verdict = REJECTION_RULES[self.verifier](tree, target_probs, transcript.draws)
        num_committed = transcript.commit_foreseen(verdict.token_ids, lambda: self.batch.is_closed(row))
        return AcceptedPath(verdict.path[:num_committed], verdict.token_ids[:num_committed])


def _guests(draft: Draft, row: int) -> list[bool] | None:
    """Which nodes of a row are read but never become text; None where all may."""
    return None if draft.is_lookahead is None else draft.is_lookahead[min(row, len(draft.is_lookahead) - 1)].tolist()
