"""Token matching where the logits lie: tokens are chosen, trees walked and paths kept without asking the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ...core.sampling import ForeseeableDraws, choose_by_noise
from ...core.verification import AcceptedPath
from ...errors import GenerationError
from ..acceptors import AcceptedStep, SpoiledReadError, StepCounts
from ..drafting import Draft, Kept
from ..sequence_batch import SequenceBatch
from ..slot_cache import DEPTH_BUCKETS, bucket
from .graph import Proof
from .state import StaticState, TreeBuffers

MOST_AT_ONCE = 64  # nodes that draw at once: each holds a few numbers for every token of the vocabulary
_NUM_COUNTS = 5  # columns of a report before its path: tokens kept, whether all were valid, NaN read, nodes, depth


@dataclass(frozen=True)
class RowStep:
    """What a row accepted in a step, as the host reads it."""

    path: AcceptedPath
    counts: StepCounts
    draws: ForeseeableDraws
    draw_states: Sequence[Any]  # of the draws, after each token of the path; empty for greedy decoding
    device: torch.device

    def settle_draws(self, node: int) -> None:
        """Put the draws where plain decoding has them once the token after a node of the path is drawn."""
        if self.draw_states:
            self.draws.set_state(self._state_after(node), self.device)

    def is_settled(self, node: int) -> bool:
        """Whether the draws are still there, so that later tokens of the path are those that plain decoding draws."""
        return not self.draw_states or self.draws.is_at(self._state_after(node), self.device)

    def _state_after(self, node: int) -> Any:
        return self.draw_states[self.path.path.index(node)]


class PathBuffers:
    """Accepted paths of a fixed depth, with their tokens and features."""

    @torch.inference_mode(False)
    def __init__(self, num_rows: int, depth: int, device: torch.device, features: Tensor | None) -> None:
        self.report = torch.zeros(num_rows, _NUM_COUNTS + 2 * (depth + 1), dtype=torch.long, device=device)
        self.token_ids = torch.zeros(num_rows, depth + 1, dtype=torch.long, device=device)
        self.num = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self.features: Any = None
        if features is not None:
            shape = (num_rows, depth + 1, features.shape[-1])
            self.features = torch.zeros(shape, dtype=features.dtype, device=device)

    @property
    def results(self) -> list[Tensor]:
        """All of it, as numbers that can be compared."""
        found = [self.report, self.token_ids, self.num]
        return found if self.features is None else [*found, self.features]


class DeviceAcceptor:
    """Accepts drafts during one call; the text on the device is that of the host after every step."""

    _paths: PathBuffers  # of the newest step

    def __init__(self, state: StaticState, batch: SequenceBatch, vocab_size: int) -> None:
        self._state, self._batch, self._vocab_size = state, batch, vocab_size
        self._scoring = state.scoring(batch.processors, vocab_size)
        # of each row the states after the coming draws whose noise is in the buffers
        self._draw_states: list[list[Any]] = [[] for _ in range(len(batch))]
        self._newest_states: list[Any] = [None] * len(batch)  # after the newest step, until somebody looks
        self._depth: int | None = None  # of the paths that the device has chosen; None: it has not
        self.num_kept: list[int] = []  # in the newest step, by row
        self.reset()

    def reset(self) -> None:
        """Take over the text from the host, as at the beginning and where a text ends within a path."""
        self._scoring.reset(self._batch.processors, [row.input_ids for row in self._batch.rows])
        self._state.roots.copy_(self._batch.roots)

    def draft_of_roots(self) -> Draft:
        """The newest token of each row, as a draft."""
        state = self._state
        return Draft(state.roots, state.tree(1).parents, num_passes=0, max_depth=0, copies=state.root_copies)

    def noise_ahead(self, row: int, depth: int) -> Tensor:
        """The noise `[vocab]` of a row's draw at a depth of the next draft, 1 being the next token."""
        self._draw(row, depth)
        return self._state.noise_of(depth, self._vocab_size)[depth - 1, row]

    def _draw(self, row: int, num: int) -> None:
        state, draws, states = self._state, self._batch.rows[row].draws, self._draw_states[row]
        newest, self._newest_states[row] = self._newest_states[row], None
        if newest is not None and not draws.is_at(newest, state.device):  # a criterion may draw, too
            states.clear()
        if len(states) < num:
            noise = state.noise_of(num, self._vocab_size)
            states += draws.fill_ahead(noise[len(states) : num, row], states[-1] if states else None)

    def accept(self, draft: Draft, _logits: Tensor, may_be_spoiled: Sequence[bool]) -> AcceptedStep | None:
        """Write the part of a draft that the device has chosen; None if there was no memory for choosing.

        Raises:
            [`SpoiledReadError`]: NaN was read after some node of a row that drafted nodes `may_be_spoiled`.
        """
        depth, self._depth = self._depth, None
        if depth is None:
            return None

        steps = self._read(self._paths, depth, may_be_spoiled if draft.token_ids.shape[1] > 1 else ())
        batch = self._batch
        emitted = batch.emit({row: step.path for row, step in enumerate(steps) if not batch.has_ended(row)}, steps)
        paths = [emitted.get(row, AcceptedPath()) for row in range(len(steps))]
        return AcceptedStep(paths, [step.counts for step in steps])

    def choose(self, draft: Draft) -> None:
        """Let the device choose a path of a draft behind the read of it, and keep it in the cache.

        Without memory for it nothing is kept.
        """
        self._depth = None
        try:
            self._choose(draft)
        except torch.OutOfMemoryError:
            return
        self._depth = bucket(draft.depth, DEPTH_BUCKETS)

    def _choose(self, draft: Draft) -> None:
        state, batch, num_nodes = self._state, self._batch, draft.token_ids.shape[1]
        buffers = state.tree(num_nodes)
        if draft.is_lookahead is not None:
            state.pool.flush()  # reading writes them, too
            buffers.text_parents[:, :num_nodes].masked_fill_(draft.is_lookahead.to(state.device), -1)
        depth = bucket(draft.depth, DEPTH_BUCKETS)
        if batch.do_sample:
            for row in range(len(batch)):
                self._draw(row, depth + 1)
        key = (depth, None if buffers.features is None else buffers.features.shape[-1])
        if key not in state.paths:
            state.paths[key] = PathBuffers(len(batch), depth, state.device, buffers.features)
        self._paths = paths = state.paths[key]
        work_key = ("accept", buffers.token_ids.shape[1], key, batch.do_sample, self._scoring)
        noise = [] if self._noise is None else [self._noise]
        proof = Proof(
            "what accepts a draft",
            lambda: [state.roots, *noise, *self._scoring.state, *state.changed_by_keep(depth)],
            lambda: paths.results,
        )
        state.work(work_key).run(lambda: self._run(buffers, paths, depth), proof)

    def _run(self, buffers: TreeBuffers, paths: PathBuffers, depth: int) -> None:
        """Choose, walk and keep; the work that is captured."""
        state = self._state
        is_large = self._batch.do_sample and buffers.token_ids.shape[1] > MOST_AT_ONCE
        depends_on_path = is_large or self._scoring.sees_text
        walk = self._walk if depends_on_path else self._look_up
        path, token_ids, num_kept, is_valid = walk(buffers, depth)
        paths.token_ids.copy_(token_ids)
        paths.num.copy_(num_kept)
        if buffers.features is not None:
            paths.features.copy_(
                buffers.features.gather(1, path[:, :, None].expand(-1, -1, buffers.features.shape[-1]))
            )

        num_nodes = 1 + (buffers.parents >= 0).sum(-1, keepdim=True)
        max_depth = (buffers.depths * (buffers.text_parents >= 0)).amax(-1, keepdim=True)
        has_nan = buffers.logits[..., 0].isnan().any(-1, keepdim=True) & state.is_open
        parts = (num_kept, is_valid, has_nan, num_nodes, max_depth, path, token_ids)
        paths.report.copy_(torch.cat([part.long() for part in parts], dim=-1))

        # what cannot be done twice, once there was memory for all else
        newest = token_ids.gather(1, (num_kept - 1).clamp(min=0))
        newest = torch.where(state.is_open, newest, state.roots)
        noise = coming = self._noise
        if noise is not None:  # what was not needed is that of the next draws
            draws = torch.arange(len(noise), device=state.device)[:, None] + num_kept.T
            coming = noise.gather(0, draws.clamp(max=len(noise) - 1)[..., None].expand_as(noise))
        state.keep(path, num_kept)
        if noise is not None and coming is not None:
            noise.copy_(coming)
        state.roots.copy_(newest)
        if depends_on_path:
            self._scoring.end()

    @property
    def _noise(self) -> Tensor | None:
        """The noise `[draws, rows, vocab]` of the coming draws; None for greedy decoding."""
        return self._state.noise if self._batch.do_sample else None

    def _walk(self, buffers: TreeBuffers, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Accepted paths and their tokens `[rows, 1 + depth]`, how many of them count, and whether those are valid."""
        state, scoring = self._state, self._scoring
        node, is_on = torch.zeros_like(state.roots), state.is_open
        num_kept, is_valid = torch.zeros_like(node), torch.ones_like(is_on)
        nodes, tokens = [], []
        scoring.begin()

        for number in range(depth + 1):
            index = node[:, :, None].expand(-1, -1, buffers.logits.shape[-1])
            scores = scoring.score(buffers.logits.gather(1, index)[:, 0].float())
            token, is_finite = choose_by_noise(scores, None if self._noise is None else self._noise[number])
            is_child = buffers.text_parents == node
            nodes.append(node)
            tokens.append(token)
            num_kept = num_kept + is_on
            is_valid = is_valid & (is_finite | ~is_on)
            scoring.add(token, is_on)
            is_next = is_child & (buffers.token_ids == token)
            is_on = is_on & is_next.any(-1, keepdim=True)
            node = torch.where(is_on, is_next.int().argmax(-1, keepdim=True), node)

        return torch.cat(nodes, dim=-1), torch.cat(tokens, dim=-1), num_kept, is_valid

    def _look_up(self, buffers: TreeBuffers, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same where a choice depends on its node alone: all choose at once, and know who follows them."""
        token_ids, state, noise = buffers.token_ids, self._state, self._noise
        scores = self._scoring.score(buffers.logits.flatten(0, 1).float())
        if noise is not None:
            draws = buffers.depths.clamp(max=depth)[..., None].expand(-1, -1, noise.shape[-1])
            noise = noise.transpose(0, 1).gather(1, draws).flatten(0, 1)
        tokens, is_finite = (found.view_as(token_ids) for found in choose_by_noise(scores, noise))
        numbers = torch.arange(token_ids.shape[1], device=state.device)
        is_next = (buffers.text_parents[:, None] == numbers[:, None]) & (token_ids[:, None] == tokens[..., None])
        following = torch.where(is_next.any(-1), is_next.int().argmax(-1), numbers)  # the last one follows itself

        nodes = [torch.zeros_like(state.roots)]
        for _ in range(depth):
            nodes.append(following.gather(1, nodes[-1]))
        path = torch.cat(nodes, dim=-1)
        num_kept = 1 + (path[:, 1:] != path[:, :-1]).sum(-1, keepdim=True)
        is_valid = is_finite.gather(1, path).all(-1, keepdim=True) | ~state.is_open
        return path, tokens.gather(1, path), num_kept * state.is_open, is_valid

    def _read(self, paths: PathBuffers, depth: int, may_be_spoiled: Sequence[bool]) -> list[RowStep]:
        """Each row's part of the report: the one thing that the host waits for."""
        steps, length = [], depth + 1
        report, states = paths.report.tolist(), self._draw_states
        self._draw_states = [[] for _ in report]
        if any(compress((has_nan for _, _, has_nan, *_ in report), may_be_spoiled)):
            raise SpoiledReadError

        for row, (end, is_valid, _, num_nodes, max_depth, *rest) in enumerate(report):
            if self._batch.do_sample and not is_valid:
                raise GenerationError(
                    "Sampling needs a finite best score, but after the logits processors there is none. Look for a "
                    "processor that divides by zero or forbids every token, or a target whose own logits overflow."
                )

            counts = StepCounts(num_nodes, max_depth)
            draws = self._batch.rows[row].draws
            accepted = AcceptedPath(tuple(rest[:end]), tuple(rest[length : length + end]))
            steps.append(RowStep(accepted, counts, draws, states[row], self._state.device))
            self._draw_states[row] = states[row][end:]
            if self._batch.do_sample and end:
                self._newest_states[row] = states[row][end - 1]

        self.num_kept = [len(step.path.path) for step in steps]
        return steps

    def kept(self, paths: Sequence[AcceptedPath]) -> Kept:
        """What the newest step kept, for drafters that take it as it lies on the device."""
        buffers, num_new = self._paths, tuple(len(path.path) for path in paths)
        if list(num_new) != self.num_kept:  # a text ended within its path
            buffers.num.copy_(torch.tensor(num_new)[:, None])
        new_ids = tuple(path.token_ids for path in paths)
        return Kept(buffers.token_ids, buffers.features, buffers.num, num_new, new_ids)
