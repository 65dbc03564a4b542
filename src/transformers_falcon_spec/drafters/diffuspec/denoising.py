"""One row's text as the diffusion model reads it, round after round, and what it says of the masks behind it.

What is kept of keys and values depends on who sees whom: all of the text where nothing in it sees masks, whole blocks
of a grid, nothing where all see all; or, for some rounds, what full attention left, as an approximation.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from ...generation.cache import drop_last
from .calls import ModelCall, visible

if TYPE_CHECKING:
    from .modeling_diffuspec import DiffusionDrafter


class DenoisedRow:
    """The diffusion model's side of one row."""

    def __init__(self, drafter: "DiffusionDrafter") -> None:
        self.drafter, self.config = drafter, drafter.config
        self.grid = (drafter.config.block_size or 1) if drafter.config.attention == "block_causal" else 1
        self.num_cached = 0  # tokens of the text whose keys and values are kept
        keeps_cache = self.config.attention != "full" or self.config.cache_rounds > 1
        self._cache = DynamicCache() if keeps_cache else None
        self._num_rounds = 0

    def max_draft_tokens(self, num_committed: int) -> int:
        """Most tokens that fit behind a text of this length: to the end of its block on the grid or the context."""
        most, shift = self.config.most_draft_tokens, self.config.logits_shift
        context = getattr(self.config.draft_config, "max_position_embeddings", None)
        if context is not None:
            most = min(most, context - num_committed + shift)
        if self.config.attention == "block_causal":
            most = min(most, self.grid - num_committed % self.grid + shift)
        return max(most, 0)

    def scores(self, text: Tensor, num_tokens: int, num_steps: int, scored: Callable[[Tensor], Tensor]) -> Tensor:
        """Scores `[num_tokens, vocab]` of `num_tokens` masks behind all committed tokens, `text` `[tokens]`.

        With several passes every position keeps the scores of the last pass in which it was masked; between passes the
        surest of those that are still masked are committed, as many in each (arXiv 2510.02358, section 3.1, which
        leaves both open). `scored` makes scores over the target's ids of logits.
        """
        if self.config.cache_rounds > 1 and self._num_rounds % self.config.cache_rounds == 0:
            self._crop(0)
        self._num_rounds += 1
        block = torch.full((num_tokens,), self.config.mask_token_id or 0, device=text.device)
        is_masked = torch.ones_like(block, dtype=torch.bool)
        num_each = -(-num_tokens // num_steps)
        found = scored(self._read(text, block))
        while num_each < int(is_masked.sum()):
            surest = found.log_softmax(-1).amax(-1).masked_fill(~is_masked, -torch.inf).topk(num_each).indices
            block[surest] = found[surest].argmax(-1)
            is_masked[surest] = False
            found = scored(self._read(text, block)).where(is_masked[:, None], found)
        return found

    def _read(self, text: Tensor, block: Tensor) -> Tensor:
        """Logits `[block, vocab]` of a block behind the text; keys and values that hold in later rounds are kept."""
        config, num_committed = self.config, len(text)
        start = min(self.num_cached, num_committed - config.logits_shift)
        self._crop(start)
        fed = torch.cat([text[start:], block[: len(block) - config.logits_shift]])
        slots = torch.arange(start + len(fed), device=text.device)
        allowed = visible(config.attention, num_committed, config.block_size, slots[start:], slots)
        call = ModelCall(fed[None], slots[None, start:], allowed[None], self._cache, len(block))
        logits = call.logits(self.drafter.model)[0]
        if self._cache is not None:
            self.num_cached = len(slots)
            self._crop(num_committed - num_committed % self.grid)
        return logits

    def _crop(self, num_tokens: int) -> None:
        if self._cache is not None and self.num_cached > num_tokens:
            drop_last(self._cache, self.num_cached - num_tokens)
            self.num_cached = num_tokens
