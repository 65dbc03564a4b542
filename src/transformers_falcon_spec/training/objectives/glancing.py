"""Coupled sequential glancing: which rows are shown the truth one block ahead, and what they then hold.

Source: arXiv 2412.12639, section 3.2; the invariant that keeps labels from leaking is tested in `tests/training`.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..features import PairBatch


def glancing_budget(num_mismatches: int, ratio: float, progress: float) -> int:
    """Rows to reveal: the Hamming distance of pass 1 times a ratio that falls to 0 as training (0 to 1) goes on."""
    return round(ratio * (1 - progress) * num_mismatches)


def reveal_mask(
    is_counted: Bool[Tensor, "rows pairs"],
    places: Int[Tensor, "rows pairs"],
    block_size: int,
    num_rows: int,
    generator: torch.Generator,
) -> Bool[Tensor, "rows pairs"]:
    """True at revealed rows: prefixes of 1 to k - 1 rows of random blocks, until `num_rows` rows are chosen.

    Only true blocks are taken, and only those that lie wholly inside the loss mask.

    Args:
        is_counted (`torch.Tensor` of shape `(rows, pairs)`): The loss mask.
        places (`torch.Tensor` of shape `(rows, pairs)`): Place of each row in its block, counted from 0.
        block_size (`int`): Rows of a block.
        num_rows (`int`): The budget.
        generator (`torch.Generator`): All draws come from here.
    """
    mask = torch.zeros_like(is_counted)
    starts = _block_starts(is_counted, places, block_size)
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


def _block_starts(is_counted: Tensor, places: Tensor, block_size: int) -> Int[Tensor, "blocks 2"]:
    """Row and position of every block whose rows all count."""
    num_pairs = is_counted.shape[1]
    if num_pairs < block_size:
        return torch.zeros(0, 2, dtype=torch.long, device=is_counted.device)
    is_whole = is_counted.unfold(1, block_size, 1).all(-1)  # [rows, pairs - k + 1]
    return (is_whole & (places[:, : is_whole.shape[1]] == 0)).nonzero()


def reveal(pairs: PairBatch, clean_features: Tensor, mask: Bool[Tensor, "rows pairs"], block_size: int) -> PairBatch:
    """`pairs` with BOTH inputs of revealed rows replaced by the noise-free truth one block ahead; those rows no longer count."""
    return replace(
        pairs,
        token_embeds=torch.where(mask[..., None], pairs.token_embeds.roll(-block_size, dims=1), pairs.token_embeds),
        features=torch.where(mask[..., None], clean_features.roll(-block_size, dims=1), pairs.features),
        is_counted=pairs.is_counted & ~mask,
    )
