"""Drafting with Falcon: reads committed pairs, then drafts a static tree, block by block, one pass for each level.

State between steps follows `docs/how_it_works.md`: keys and values of committed rows, the LSTM's state after the last of them and
its outputs for the last k - 1. All draft state is dropped after every proposal.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from ...core.masks import block_causal_mask, block_ends
from ...core.sampling import draw_distinct
from ...core.tree import DraftTree
from ...errors import OptionError
from ...generation.cache import drop_last
from ...generation.candidates import Committed, Draft, DraftBudget, TargetView, TreeCandidateGenerator
from .plan import DraftPass, draft_passes

if TYPE_CHECKING:
    from .modeling_falcon import FalconSpecDrafter, RecurrentState


class FalconCandidateGenerator(TreeCandidateGenerator):
    """One call's drafting with a [`FalconSpecDrafter`]; one row."""

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
        self._pending: list[tuple[Tensor, Tensor]] = []  # token ids [1, new] and features [1, new, feature]
        self._num_rows = 0  # committed rows read so far
        self._cache = DynamicCache()
        self._state: RecurrentState | None = None
        self._tail: Tensor | None = None  # [1, up to k - 1, hidden] LSTM outputs of the newest rows

    def commit(self, committed: Committed) -> None:
        """Keep the new pairs for the next proposal."""
        num_new = committed.num_new[0]
        new_ids = committed.sequence_ids[:, committed.lengths[0] - num_new : committed.lengths[0]]
        assert committed.features is not None  # a drafter of this kind reads at least one layer
        self._pending.append((new_ids, committed.features))

    def propose(self, budget: DraftBudget) -> Draft | None:
        """Draft the tree, cut to the budget; None while fewer than k rows are there to draft from."""
        root = self._pending[-1][0][:, -1:]  # newest committed token
        features = self._read_pending()
        if features is None:
            return None
        max_depth = min(budget.depths[0], self._max_depth)
        if budget.num_passes is not None:
            max_depth = min(max_depth, budget.num_passes * self.block_size)
        tree = _fitted(self._tree, max_depth, budget.num_nodes, budget.is_chain)
        passes = draft_passes(tree, self.block_size, self.drafter.device)
        token_ids = root.to(self.drafter.device).repeat(1, len(tree))
        state, num_drafted_rows = self._state, 0
        dists: list[Tensor] = []  # [parents, vocab] of each pass
        dist_index = torch.full_like(token_ids, -1)
        for number, draft_pass in enumerate(passes):
            if number:
                features, state = self._draft_level(draft_pass, token_ids, features, state, number)
                num_drafted_rows += draft_pass.fed_nodes.numel()
            logits = self.target.head(features)
            if budget.temperature is None:
                best = logits.topk(draft_pass.num_ranks, dim=-1).indices  # [blocks, k, ranks]
                found = best[tuple(draft_pass.sources)]
            else:
                probs, found = self._drawn(draft_pass, logits, budget, number)
                dist_index[0, draft_pass.parents] = sum(map(len, dists)) + torch.arange(len(probs))
                dists.append(probs)
            token_ids[0, draft_pass.nodes] = found.to(token_ids.device)
        drop_last(self._cache, num_drafted_rows)
        drawn = {"draft_probs": torch.cat(dists)[None], "dist_index": dist_index} if dists else {}
        return Draft(token_ids, tree.parents.to(token_ids.device), num_passes=len(passes), **drawn)

    def _drawn(self, draft_pass: DraftPass, logits: Tensor, budget: DraftBudget, number: int) -> tuple[Tensor, Tensor]:
        """Distributions `[parents, vocab]` of the parents' children, and the drawn tokens `[drafted]`; each parent draws anew."""
        assert budget.temperature is not None  # the caller asked
        probs = torch.softmax(logits[tuple(draft_pass.lists)] / budget.temperature, dim=-1)
        if budget.noise is None:
            noise = torch.empty(probs.shape).exponential_(generator=self.rng).to(probs.device)
        else:
            depths = (draft_pass.lists[1] + number * self.block_size + 1).tolist()
            noise = torch.stack([budget.noise(depth) for depth in depths]).to(probs.device)
        num_children = int(draft_pass.siblings[1].max()) + 1
        return probs, draw_distinct(probs, noise, num_children)[tuple(draft_pass.siblings)]

    def _read_pending(self) -> Tensor | None:
        """Read the new pairs, re-running old rows where fewer than k came; features of the last block `[1, k, hidden]`."""
        ids = torch.cat([ids for ids, _ in self._pending], dim=1)
        features = torch.cat([features for _, features in self._pending], dim=1)
        self._pending = []
        fused, self._state = self.drafter.recur(self._rows(ids, features), self._state)
        num_rerun = 0
        if self._tail is not None:
            num_rerun = max(min(self.block_size - fused.shape[1], self._tail.shape[1]), 0)
            fused = torch.cat([self._tail, fused], dim=1)
        self._num_rows += ids.shape[1]
        rows = fused[:, -(num_rerun + ids.shape[1]) :]
        self._tail = fused[:, max(fused.shape[1] - self.block_size + 1, 0) :]
        if num_rerun:
            drop_last(self._cache, num_rerun)
        places = torch.arange(self._num_rows, device=rows.device)
        positions = places[-rows.shape[1] :]
        ends = block_ends(positions, self.block_size, torch.tensor(self._num_rows, device=rows.device))
        block_positions = self.block_size - 1 - (ends - positions)
        outputs = self.drafter.attend(
            rows, block_causal_mask(ends, places)[None], positions[None], block_positions[None], self._cache
        )
        return outputs[:, -self.block_size :] if self._num_rows >= self.block_size else None

    def _draft_level(
        self, draft_pass: DraftPass, token_ids: Tensor, features: Tensor, state: "RecurrentState | None", number: int
    ) -> tuple[Tensor, "RecurrentState | None"]:
        """All blocks of a level in one forward: features `[blocks, k, hidden]` and the LSTM's state after each block."""
        parents = draft_pass.parent_blocks
        inputs = self._rows(token_ids[0, draft_pass.fed_nodes], features[parents])
        if state is not None:
            state = (state[0][:, parents].contiguous(), state[1][:, parents].contiguous())
        fused, state = self.drafter.recur(inputs, state)  # each block goes on from its parent's state
        blocks, size = draft_pass.fed_nodes.shape
        first = self._num_rows + (number - 1) * size
        block_positions = torch.arange(size, device=fused.device).repeat(blocks)[None]
        seen = draft_pass.tail_mask
        mask = torch.cat([seen.new_ones(len(seen), self._num_rows), seen], dim=1)
        rows = fused.reshape(1, blocks * size, -1)
        outputs = self.drafter.attend(rows, mask[None], first + block_positions, block_positions, self._cache)
        return outputs.reshape(blocks, size, -1), state

    def _rows(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """Input rows: embedding beside feature, in the drafter's type and place."""
        parts = [self.target.embed(token_ids), features]
        return torch.cat([part.to(self.drafter.device, self.drafter.dtype) for part in parts], dim=-1)


@lru_cache(maxsize=256)
def _fitted(tree: DraftTree, max_depth: int, num_nodes: int, is_chain: bool) -> DraftTree:
    """The part of `tree` within the limits; the tree itself where all of it is."""
    if max_depth >= int(tree.depths.max()) and num_nodes >= len(tree) and not is_chain:
        return tree
    return tree.pruned(max_depth, num_nodes, is_chain)
