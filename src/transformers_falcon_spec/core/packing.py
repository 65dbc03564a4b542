"""Several texts in one row: which tokens belong together, what lies ahead of each, and every text as a row of its own.

Positions tell texts apart: each text starts at 0 and counts on, so that every 0 begins a new one. Padding counts on behind the
last text of its row. Positions `[1, tokens]` are those of all rows.
"""

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


def one_text(num_tokens: int, device: torch.device) -> Int[Tensor, "1 tokens"]:
    """The positions of rows that hold a single text each."""
    return torch.arange(num_tokens, device=device)[None]


def is_packed(positions: Int[Tensor, "_ tokens"]) -> bool:
    """Whether any row holds more than one text."""
    return bool((positions[:, 1:] == 0).any())


def text_numbers(positions: Int[Tensor, "_ tokens"], num_rows: int) -> Int[Tensor, "rows tokens"]:
    """The number of each token's text; texts are counted from 0 through all rows."""
    starts = (positions == 0).expand(num_rows, -1)
    return starts.flatten().cumsum(0).view(starts.shape) - 1


def text_lengths(numbers: Int[Tensor, "rows tokens"]) -> list[int]:
    """Tokens of each text; those of the last one in a row with the padding behind it."""
    lengths: list[int] = numbers.flatten().bincount().tolist()
    return lengths


def same_text(positions: Int[Tensor, "_ tokens"]) -> Bool[Tensor, "_ tokens tokens"]:
    """Whether two tokens of a row belong to one text."""
    numbers = (positions == 0).cumsum(-1)
    return numbers[:, :, None] == numbers[:, None, :]


def shift_left(
    values: Shaped[Tensor, "rows tokens *rest"], positions: Int[Tensor, "_ tokens"], num_places: int
) -> Shaped[Tensor, "rows tokens *rest"]:
    """`values` moved so that place p holds what stood at p + num_places; zeros where that lies past the end of p's text."""
    length = values.shape[1]
    moved = torch.cat([values, values.new_zeros(len(values), num_places, *values.shape[2:])], dim=1)[:, num_places:]
    there = torch.cat([positions, positions.new_full((len(positions), num_places), -1)], dim=1)[:, num_places:]
    is_inside = there[:, :length] == positions + num_places
    return moved[:, :length].masked_fill(~is_inside.view(*is_inside.shape, *[1] * (values.dim() - 2)), 0)


def unpack(
    values: Shaped[Tensor, "rows tokens *rest"],
    numbers: Int[Tensor, "rows tokens"],
    positions: Int[Tensor, "_ tokens"],
) -> Shaped[Tensor, "texts longest *rest"]:
    """Every text a row of its own, in order, zeros behind it; `unpack(...)[numbers, positions]` are the values again."""
    num_texts, longest = int(numbers[-1, -1]) + 1, int(positions.max()) + 1
    texts = values.new_zeros(num_texts, longest, *values.shape[2:])
    return texts.index_put((numbers, positions.expand_as(numbers)), values)
