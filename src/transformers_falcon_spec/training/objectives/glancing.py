"""Coupled sequential glancing: choosing the rows that are shown the truth one block ahead, and replacing their inputs.

Source: arXiv 2412.12639, section 3.2. `tests/training` tests that no label leaks into an input.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..features import PairBatch


def glancing_budget(num_mismatches: int, ratio: float, progress: float) -> int:
    """The number of rows to reveal: the errors of pass 1 times a ratio that falls to 0 as `progress` goes to 1."""
    return round(ratio * (1 - progress) * num_mismatches)


def reveal_mask(
    is_counted: Bool[Tensor, "rows pairs"],
    block_offsets: Int[Tensor, "rows pairs"],
    block_size: int,
    num_rows: int,
    generator: torch.Generator,
) -> Bool[Tensor, "rows pairs"]:
    """Choose the rows to reveal: the first 1 to k - 1 rows of random blocks, until `num_rows` rows are chosen.

    Only complete blocks are used, all of whose rows are in the loss mask.

    Args:
        is_counted (`torch.Tensor` of shape `(rows, pairs)`): The loss mask.
        block_offsets (`torch.Tensor` of shape `(rows, pairs)`): Offset of each row in its block, counted from 0.
        block_size (`int`): Rows of a block.
        num_rows (`int`): The budget.
        generator (`torch.Generator`): The source of all random draws.
    """
    mask = torch.zeros_like(is_counted)
    starts = _block_starts(is_counted, block_offsets, block_size)
    if block_size == 1 or num_rows <= 0 or not len(starts):
        return mask
    order = torch.randperm(len(starts), generator=generator)
    lengths = torch.randint(1, block_size, (len(starts),), generator=generator)
    is_chosen = lengths.cumsum(0) - lengths < num_rows
    starts, lengths = (
        starts[order.to(starts.device)][is_chosen.to(starts.device)],
        lengths[is_chosen].to(starts.device),
    )
    for offset in range(block_size - 1):
        rows, first = starts[lengths > offset].unbind(-1)
        mask[rows, first + offset] = True
    return mask


def _block_starts(is_counted: Tensor, block_offsets: Tensor, block_size: int) -> Int[Tensor, "blocks 2"]:
    """Row and column of the first pair of every block whose pairs all count."""
    num_pairs = is_counted.shape[1]
    if num_pairs < block_size:
        return torch.zeros(0, 2, dtype=torch.long, device=is_counted.device)
    is_complete = is_counted.unfold(1, block_size, 1).all(-1)  # [rows, pairs - k + 1]
    return (is_complete & (block_offsets[:, : is_complete.shape[1]] == 0)).nonzero()


def reveal(pairs: PairBatch, clean_features: Tensor, mask: Bool[Tensor, "rows pairs"], block_size: int) -> PairBatch:
    """Replace both inputs of revealed rows by the noise-free truth one block ahead; these rows no longer count."""
    return replace(
        pairs,
        token_embeds=torch.where(mask[..., None], pairs.token_embeds.roll(-block_size, dims=1), pairs.token_embeds),
        features=torch.where(mask[..., None], clean_features.roll(-block_size, dims=1), pairs.features),
        is_counted=pairs.is_counted & ~mask,
    )
