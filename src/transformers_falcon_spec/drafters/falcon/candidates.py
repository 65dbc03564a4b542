"""Drafting with Falcon: reads committed pairs, then drafts a static tree, block by block, one pass for each level.

State between steps follows `docs/how_it_works.md`: keys and values of committed rows, the LSTM's state after the last of them and
its outputs for the last k - 1. All draft state is dropped after every proposal.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from ...core.masks import block_causal_mask, block_ends
from ...errors import OptionError
from ...generation.cache import HOLE, RowSlots, drop_last
from ...generation.candidates import Committed, Draft, DraftBudget, TargetView, TreeCandidateGenerator
from ..static_tree import draw_children, fitted, parents_by_row
from .plan import DraftPass, draft_passes

if TYPE_CHECKING:
    from .modeling_falcon import FalconSpecDrafter, RecurrentState


class FalconCandidateGenerator(TreeCandidateGenerator):
    """One call's drafting with a [`FalconSpecDrafter`]; all rows in the same passes, each with its own past."""

    def __init__(
        self, drafter: "FalconSpecDrafter", target: TargetView, max_length: int, rng: torch.Generator
    ) -> None:
        super().__init__(target, max_length, rng)
        self.drafter = drafter
        self.feature_layers = drafter.feature_layers
        self.block_size: int = drafter.config.block_size
        self._tree = drafter.draft_tree
        self._max_depth = int(self._tree.depths.max())
        if self._max_depth > self.block_size and self.feature_layers != (-1,):
            raise OptionError(
                f"A drafter that reads the hidden states {self.feature_layers} predicts the last one only, so that it has "
                f"nothing to feed a second pass: its draft tree must end at depth {self.block_size}, the block size, but "
                f"it reaches depth {self._max_depth}."
            )
        self._pending: list[_Row] = []  # of each row the pairs not read yet
        self._num_read: list[int] = []  # of each row the committed pairs read so far
        self._tails: list[Tensor] = []  # of each row [up to k - 1, hidden] LSTM outputs of its newest pairs
        self._state: RecurrentState | None = None
        self._slots = RowSlots(DynamicCache(), torch.zeros(1, 0, dtype=torch.long))

    def commit(self, committed: Committed) -> None:
        """Keep the new pairs for the next proposal."""
        assert committed.features is not None  # a drafter of this kind reads at least one layer
        if not self._pending:
            num_rows, device = len(committed.lengths), committed.sequence_ids.device
            self._pending = [_Row() for _ in range(num_rows)]
            self._num_read, self._tails = [0] * num_rows, [torch.empty(0)] * num_rows
            no_places = torch.zeros(num_rows, 0, dtype=torch.long, device=device)
            self._slots = RowSlots(self._slots.cache, no_places)
        for row, (length, num_new) in enumerate(zip(committed.lengths, committed.num_new, strict=True)):
            ids = committed.sequence_ids[row, :length]
            self._pending[row].add(ids[length - num_new :], committed.features[row, :num_new], ids[-1:])

    def propose(self, budget: DraftBudget) -> Draft | None:
        """Draft the tree, cut to the budget; None while no row has new pairs and the k that a block needs."""
        roots = torch.stack([pending.root for pending in self._pending])
        features, state = self._read_pending()
        has_block = [
            num >= self.block_size and pending.num_taken > 0
            for num, pending in zip(self._num_read, self._pending, strict=True)
        ]
        if not any(has_block):
            return None
        depths = [depth * ready for depth, ready in zip(budget.depths, has_block, strict=True)]
        max_depth = min(max(depths), self._max_depth)
        if budget.num_passes is not None:
            max_depth = min(max_depth, budget.num_passes * self.block_size)
        tree = fitted(self._tree, max_depth, budget.num_nodes, budget.is_chain)
        passes = draft_passes(tree, self.block_size, self.drafter.device)
        token_ids = roots.to(self.drafter.device).repeat(1, len(tree))
        num_drafted_slots = 0
        dists: list[Tensor] = []  # [rows, parents, vocab] of each pass
        dist_index = torch.full_like(token_ids[:1], -1)
        for number, draft_pass in enumerate(passes):
            if number:
                features, state = self._draft_level(draft_pass, token_ids, features, state, number)
                num_drafted_slots += draft_pass.fed_nodes.numel()
            logits = self.target.head(features)
            if budget.temperature is None:
                best = logits.topk(draft_pass.num_ranks, dim=-1).indices  # [rows, blocks, k, ranks]
                found = best[(slice(None), *draft_pass.sources)]
            else:
                probs, found = self._drawn(draft_pass, logits, budget, number)
                num_dists = sum(dist.shape[1] for dist in dists)
                dist_index[0, draft_pass.parents] = num_dists + torch.arange(probs.shape[1])
                dists.append(probs)
            token_ids[:, draft_pass.nodes] = found.to(token_ids.device)
        drop_last(self._slots.cache, num_drafted_slots)
        drawn = {"draft_probs": torch.cat(dists, dim=1), "dist_index": dist_index} if dists else {}
        return Draft(token_ids, parents_by_row(tree, depths).to(token_ids.device), num_passes=len(passes), **drawn)

    def _drawn(self, draft_pass: DraftPass, logits: Tensor, budget: DraftBudget, number: int) -> tuple[Tensor, Tensor]:
        """Distributions `[rows, parents, vocab]` of the parents' children, and the drawn tokens `[rows, drafted]`."""
        assert budget.temperature is not None  # the caller asked
        probs = torch.softmax(logits[(slice(None), *draft_pass.lists)] / budget.temperature, dim=-1)
        depths = (draft_pass.lists[1] + number * self.block_size + 1).tolist()
        num_children = int(draft_pass.siblings[1].max()) + 1
        children = draw_children(probs, depths, num_children, budget, self.rng)
        return probs, children[(slice(None), *draft_pass.siblings)]

    def _read_pending(self) -> tuple[Tensor, "RecurrentState | None"]:
        """Read the new pairs, re-running old ones where fewer than k came; `[rows, 1, k, hidden]` of each row's last block."""
        ids, features = (pad_sequence(list(part), True) for part in zip(*map(_Row.take, self._pending), strict=True))
        num_new = [pending.num_taken for pending in self._pending]
        fused, self._state = self.drafter.recur(self._rows(ids, features), self._state, num_new)
        rows, num_rerun = [], []
        for row, num in enumerate(num_new):
            known = torch.cat([self._tails[row].to(fused).reshape(-1, fused.shape[-1]), fused[row, :num]])
            num_rerun.append(max(min(self.block_size - num, len(known) - num), 0) if num else 0)
            rows.append(known[len(known) - num_rerun[row] - num :])
            self._tails[row] = known[max(len(known) - self.block_size + 1, 0) :]
            self._num_read[row] += num
        self._slots.forget(num_rerun)
        self._slots.tidy()
        outputs = self._attend_newest(pad_sequence(rows, True, padding_side="left"), list(map(len, rows)))
        missing = self.block_size - outputs.shape[1]
        outputs = torch.cat([outputs.new_zeros(len(outputs), max(missing, 0), outputs.shape[2]), outputs], dim=1)
        return outputs[:, None, -self.block_size :], self._state

    def _attend_newest(self, rows: Tensor, num_tokens: list[int]) -> Tensor:
        """The attention blocks over the newest rows of each text, right-aligned, in blocks that end at the newest one."""
        num_read = torch.tensor(self._num_read, device=rows.device)
        positions = num_read[:, None] + torch.arange(-rows.shape[1], 0, device=rows.device)
        if min(num_tokens) < rows.shape[1]:
            first = num_read - torch.tensor(num_tokens, device=rows.device)
            positions = positions.masked_fill(positions < first[:, None], HOLE)
        ends = block_ends(positions, self.block_size, num_read)
        self._slots.append(positions, num_tokens)
        mask = block_causal_mask(ends, self._slots.places) & (self._slots.places != HOLE)[:, None]
        block_positions = self.block_size - 1 - (ends - positions)
        return self.drafter.attend(rows, mask, positions.clamp(min=0), block_positions, self._slots.cache)

    def _draft_level(
        self, draft_pass: DraftPass, token_ids: Tensor, features: Tensor, state: "RecurrentState | None", number: int
    ) -> tuple[Tensor, "RecurrentState | None"]:
        """All blocks of a level in one forward: features `[rows, blocks, k, hidden]` and the LSTM's state after each block."""
        parents = draft_pass.parent_blocks
        num_rows, (blocks, size) = len(token_ids), draft_pass.fed_nodes.shape
        inputs = self._rows(token_ids[:, draft_pass.fed_nodes], features[:, parents]).flatten(0, 1)
        if state is not None:  # each block goes on from its parent's state
            by_row = (part.reshape(len(part), num_rows, -1, part.shape[-1]) for part in state)
            hidden, cell = (part[:, :, parents].flatten(1, 2).contiguous() for part in by_row)
            state = (hidden, cell)
        fused, state = self.drafter.recur(inputs, state)
        first = torch.tensor(self._num_read, device=fused.device)[:, None] + (number - 1) * size
        block_positions = torch.arange(size, device=fused.device).repeat(blocks)[None]
        seen = draft_pass.tail_mask.expand(num_rows, -1, -1)
        is_held = (self._slots.places != HOLE)[:, None].expand(-1, seen.shape[1], -1)
        mask, rows = torch.cat([is_held, seen], dim=-1), fused.reshape(num_rows, blocks * size, -1)
        outputs = self.drafter.attend(
            rows, mask, first + block_positions, block_positions.expand(num_rows, -1), self._slots.cache
        )
        return outputs.reshape(num_rows, blocks, size, -1), state

    def _rows(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """Input rows: embedding beside feature, in the drafter's type and place."""
        parts = [self.target.embed(token_ids), features]
        return torch.cat([part.to(self.drafter.device, self.drafter.dtype) for part in parts], dim=-1)


class _Row:
    """Pairs of one row that the drafter has not read yet."""

    def __init__(self) -> None:
        self.token_ids: list[Tensor] = []
        self.features: list[Tensor] = []
        self.root = torch.empty(0)  # [1] newest committed token
        self.num_taken = 0

    def add(self, token_ids: Tensor, features: Tensor, root: Tensor) -> None:
        """Pairs of a commit; maybe none."""
        self.token_ids.append(token_ids)
        self.features.append(features)
        self.root = root

    def take(self) -> tuple[Tensor, Tensor]:
        """All of them, in order."""
        token_ids, features = torch.cat(self.token_ids), torch.cat(self.features)
        self.token_ids, self.features, self.num_taken = [], [], len(token_ids)
        return token_ids, features
