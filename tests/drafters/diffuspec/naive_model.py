"""What a diffusion model says of masks behind a text, the slow way: the whole text anew, and a mask written out pair by pair."""

from typing import Any

import torch
from torch import Tensor


def sees(attention: str, query: int, key: int, num_committed: int, block_size: int | None) -> bool:
    """Whether the token at one position sees the one at another."""
    if attention == "full":
        return True
    if attention == "prefix_causal":
        return key <= query or query >= num_committed
    assert block_size is not None
    return key // block_size <= query // block_size


def naive_mask(attention: str, num_committed: int, num_tokens: int, block_size: int | None) -> Tensor:
    """Additive, `[1, 1, tokens, tokens]`, in double precision."""
    return torch.tensor(
        [
            [0.0 if sees(attention, query, key, num_committed, block_size) else -1e300 for key in range(num_tokens)]
            for query in range(num_tokens)
        ],
        dtype=torch.double,
    )[None, None]


@torch.no_grad()
def naive_logits(drafter: Any, text: list[int], block: list[int]) -> Tensor:
    """Logits `[block, vocab]` of the positions of a block behind a text; with a shift of 1 its last one is never read."""
    config = drafter.config
    shift, tokens = config.logits_shift, [*text, *block][: len(text) + len(block) - config.logits_shift]
    mask = naive_mask(config.attention, len(text), len(tokens), config.block_size)
    positions = torch.arange(len(tokens))[None]
    logits = drafter.model(
        input_ids=torch.tensor([tokens]), attention_mask=mask, position_ids=positions, use_cache=False
    ).logits
    return torch.stack([logits[0, len(text) + offset - shift] for offset in range(len(block))]).float()
