"""One row's text as the diffusion model reads it, round after round, and what it says of the masks behind it.

What is kept of keys and values depends on who sees whom: all of the text where nothing in it sees masks, whole blocks
of a grid, nothing where all see all.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...generation.cache import drop_last
from ..config_fields import context_of
from .calls import ModelCall, visible

if TYPE_CHECKING:
    from .modeling_diffuspec import DiffusionDrafter


class DenoisedRow:
    """The diffusion model's side of one row."""

    def __init__(self, drafter: "DiffusionDrafter") -> None:
        self.drafter, self.config = drafter, drafter.config
        self.grid = (drafter.config.block_size or 1) if drafter.config.attention == "block_causal" else 1
        self.num_cached = 0  # tokens of the text whose keys and values are kept
        self._cache = None if self.config.attention == "full" else DynamicCache()

    def max_draft_tokens(self, num_committed: int) -> int:
        """Most tokens that fit behind a text of this length: to the end of its block on the grid or the context."""
        most, shift = self.config.most_draft_tokens, self.config.logits_shift
        context = context_of(self.drafter.model.config)
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
        block = torch.full((1, num_tokens), self.config.mask_token_id or 0, device=text.device)
        nums = torch.full((1, 1), num_tokens, device=text.device)
        num_passes = -(-num_tokens // -(-num_tokens // num_steps))
        return surest_first(lambda ids: scored(self._read(text, ids[0]))[None], block, nums, num_steps, num_passes)[0]

    @property
    def layers(self) -> list[Any]:
        """Keys and values that are kept, by layer."""
        return [] if self._cache is None else list(self._cache.layers)

    def read_text(self, text: Tensor) -> None:
        """Keep keys and values of all of `text` `[tokens]`, whose tokens see what stands before them and no masks."""
        self._crop(len(text))
        start, slots = self.num_cached, torch.arange(len(text), device=text.device)
        if start < len(text):
            allowed = slots <= slots[start:, None]
            ModelCall(text[None, start:], slots[None, start:], allowed[None], self._cache, 1).logits(
                self.drafter.model
            )
        self.num_cached = len(text)

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


def surest_first(
    read: Callable[[Tensor], Tensor], block: Tensor, nums: Tensor, num_steps: int, num_passes: int
) -> Tensor:
    """Scores `[rows, positions, vocab]` of the first `nums` `[rows, 1]` positions of `block` `[rows, positions]`.

    `read` makes scores of a block, in which more tokens are committed with each of the `num_passes`. Those are as many
    as the `num_steps` take where a row's positions are shared out among them. Nothing is asked of the host.
    """
    is_masked = torch.arange(block.shape[1], device=block.device) < nums
    num_each = -(-nums // num_steps)
    found = read(block)
    for _ in range(num_passes - 1):
        is_left = is_masked.sum(-1, keepdim=True) > num_each
        sure = found.log_softmax(-1).amax(-1).masked_fill(~is_masked, -torch.inf)
        ranks = sure.argsort(dim=-1, descending=True).argsort(dim=-1)
        is_chosen = (ranks < num_each) & is_masked & is_left
        block = found.argmax(-1).where(is_chosen, block)
        is_masked = is_masked & ~is_chosen
        found = read(block).where((is_masked & is_left)[..., None], found)
    return found
