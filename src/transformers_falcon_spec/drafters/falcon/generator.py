"""Drafting with Falcon: reads committed pairs, then grows a tree or drafts a static one, block by block.

Between steps it keeps keys and values of committed rows, the LSTM's state after the last of them and its outputs for
the last k - 1 (`docs/how_it_works.md`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...core.masks import block_ends
from ...errors import OptionError
from ...generation.drafting import Draft, DraftBudget, TargetView
from ..tree_drafting.fixed import FixedPairs, newest_of
from ..tree_drafting.grown import GrownTreeGenerator

if TYPE_CHECKING:
    from .modeling_falcon import FalconSpecDrafter, RecurrentState


class FalconCandidateGenerator(GrownTreeGenerator):
    """One call's drafting with a [`FalconSpecDrafter`]; all rows in the same passes, each with its own past."""

    drafter: "FalconSpecDrafter"
    can_be_fixed = True

    def __init__(
        self, drafter: "FalconSpecDrafter", target: TargetView, max_length: int, rng: torch.Generator
    ) -> None:
        super().__init__(drafter, target, max_length, rng)
        self.block_size = self.least_pairs = drafter.config.block_size
        self.predicts_independently = drafter.config.transition_rank is None
        max_depth = max(int(self.tree.depths.max()), drafter.tree_depth * drafter.is_tree_dynamic)
        if max_depth > self.block_size and self.feature_layers != (-1,):
            raise OptionError(
                f"A drafter that reads the hidden states {self.feature_layers} predicts the last one only, so that it "
                f"has nothing to feed a second pass: its draft tree must end at depth {self.block_size}, the block "
                f"size, but it reaches depth {max_depth}."
            )
        self._tails: list[Tensor] = []  # of each row [up to k - 1, hidden] LSTM outputs of its newest pairs
        self._state: RecurrentState | None = None  # after the committed pairs
        self._block_state: RecurrentState | None = None  # after each block of the newest pass

    def select_rows(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        super().select_rows(rows)
        self._tails = [self._tails[row] for row in rows] if self._tails else []
        if self._state is not None:
            hidden, cell = (part[:, list(rows)] for part in self._state)
            self._state = (hidden, cell)

    def restart(self) -> None:
        """Forget the state and the outputs of the LSTM, too."""
        super().restart()
        self._tails, self._state = [], None

    def propose_tree(self, budget: DraftBudget) -> Draft | None:
        """Draft the tree, cut to the budget; None while no row has new pairs and the k that a block needs."""
        if self.fixed is not None:
            return self.propose_fixed(budget)
        if not any(self.num_unread):
            return None
        features = self.read_unread()
        rows = zip(budget.depths, self.num_read, self.pending, strict=True)
        has_block = [num >= self.block_size and pending.num_taken > 0 for _, num, pending in rows]
        if not any(has_block):
            return None
        depths = [depth * ready for depth, ready in zip(budget.depths, has_block, strict=True)]
        return self.draft(depths, budget, features)

    def read_unread(self) -> Tensor:
        """Read new pairs, and old ones again where fewer than k are new: `[rows, 1, k, hidden]` of each last block.

        Blocks end at the newest pair of each row.
        """
        ids, features, num_new = self.take_pending()
        fused, self._state = self.drafter.recur(self._rows(ids, features), self._state, num_new)
        self._tails = self._tails or [fused.new_empty(0)] * len(num_new)
        rows, num_rerun = [], []
        for row, num in enumerate(num_new):
            known = torch.cat([self._tails[row].to(fused).reshape(-1, fused.shape[-1]), fused[row, :num]])
            num_rerun.append(max(min(self.block_size - num, len(known) - num), 0) if num else 0)
            rows.append(known[len(known) - num_rerun[row] - num :][-self.reach :])
            self._tails[row] = known[max(len(known) - self.block_size + 1, 0) :]
        self.slots.forget(num_rerun)
        num_tokens = list(map(len, rows))
        positions = self.assign_slots(num_tokens)
        ends = block_ends(positions, self.block_size, self.lengths[:, 0])
        mask = self.causal_mask(positions, ends)
        block_positions, padded = self.block_size - 1 - (ends - positions), pad_sequence(rows, True, 0.0, "left")
        outputs = self.drafter.attend(padded, mask, positions.clamp(min=0), block_positions, self.slots.cache)
        missing = self.block_size - outputs.shape[1]
        outputs = torch.cat([outputs.new_zeros(len(outputs), max(missing, 0), outputs.shape[2]), outputs], dim=1)
        return outputs[:, None, -self.block_size :]

    def carried(self) -> dict[str, Tensor]:
        """The LSTM's outputs for the newest k - 1 pairs, and its state after them."""
        size, wide = self.block_size - 1, self.drafter.config.hidden_size
        tails = [torch.cat([tail.new_zeros(size, wide), tail.reshape(-1, wide)])[-size:] for tail in self._tails]
        state = {} if self._state is None else dict(zip(("hidden", "cell"), self._state, strict=True))
        return {**super().carried(), "tails": torch.stack(tails), **state}

    def enter_fixed(self, num_slots: int, most_kept: int, buffers: Any = None) -> FixedPairs:
        """Read what waits, move all that is known of the text to buffers, and go on in them."""
        fixed = super().enter_fixed(num_slots, most_kept, buffers)
        self._tails = []
        if self._state is not None:
            self._state = (fixed.carried["hidden"], fixed.carried["cell"])
        return fixed

    def read_pairs(self, token_ids: Tensor, features: Tensor, num: Tensor) -> Tensor:
        """Read the first `num` of `[rows, pairs]` in fixed shapes, and old ones again where fewer than k are new."""
        assert self.fixed is not None  # the caller asked
        fixed, size, width = self.fixed, self.block_size, max(token_ids.shape[1], self.block_size)
        fused, state = self.run("recur", self._rows(token_ids, features), self._state, num)
        known = torch.cat([fixed.carried["tails"].to(fused), fused], dim=1)
        fixed.carried["tails"].copy_(newest_of(known, num + torch.arange(size - 1, device=num.device)))
        for kept, after in zip(self._state or (), state or (), strict=True):
            kept.copy_(after)
        steps, length = torch.arange(-width, 0, device=num.device), self.lengths + num
        positions = length + steps
        ends = block_ends(positions, size, length[:, 0])
        fixed.assign_slots(positions, (positions >= 0) & (steps >= -num.clamp(min=size)) & (num > 0))
        rows, mask = newest_of(known, num + size - 1 + steps), fixed.text_mask(positions, ends)
        block_positions = size - 1 - (ends - positions)
        outputs = self.run("attend", rows, mask, positions.clamp(min=0), block_positions, fixed.cache)
        return outputs[:, None, -size:]

    def draft_blocks(self, token_ids: Tensor, features: Tensor, parents: Tensor, seen: Tensor, number: int) -> Tensor:
        """Features `[rows, blocks, k, hidden]` of all blocks of a pass; keeps the LSTM's state after each block."""
        num_rows, blocks, size = token_ids.shape
        fed = features.gather(1, parents[..., None, None].expand(-1, -1, *features.shape[2:]))
        inputs = self._rows(token_ids, fed).flatten(0, 1)
        state = self._state if number == 1 else self._block_state
        if state is not None:  # each block goes on from its parent's state
            by_row = (part.reshape(len(part), num_rows, -1, part.shape[-1]) for part in state)
            indices = parents[None, ..., None]
            taken = (part.gather(2, indices.expand(len(part), -1, -1, part.shape[-1])) for part in by_row)
            hidden, cell = (part.flatten(1, 2).contiguous() for part in taken)
            state = (hidden, cell)
        # a compiler takes no LSTM, but its steps
        num = None if self.backend is None else self.lengths.new_full((len(inputs), 1), size)
        fused, self._block_state = self.run("recur", inputs, state, num)
        first = self.lengths + (number - 1) * size
        block_positions = torch.arange(size, device=fused.device).repeat(blocks)[None]
        positions, block_positions = first + block_positions, block_positions.expand(num_rows, -1)
        rows, mask = fused.reshape(num_rows, blocks * size, -1), self.draft_mask(seen, positions)
        outputs = self.run("attend", rows, mask, positions, block_positions, self.cache)
        return outputs.reshape(num_rows, blocks, size, -1)

    def prepare(self, features: Tensor) -> Tensor:
        """What the transition makes of features alone."""
        return self.drafter.transition.prepare(self.to_drafter(features))

    def change_after(self, token_ids: Tensor, prepared: Tensor) -> Tensor:
        """What the transition says of the newest tokens of the block."""
        config, embeds = self.drafter.config, None
        if config.transition_size is not None:
            embeds = self.embed(token_ids[..., -config.transition_tokens :])
        scores: Tensor = self.run("change_after", token_ids[..., -1], prepared, embeds)
        return scores

    def _rows(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """Input rows: embedding and feature, in the drafter's type and device."""
        return torch.cat([self.embed(token_ids), self.to_drafter(features)], dim=-1)
