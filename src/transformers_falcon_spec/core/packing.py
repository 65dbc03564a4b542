"""Rows that hold several texts: which tokens belong together, and values moved to rows of their own.

Positions count the tokens of each text from 0, so every 0 starts a new text. Padding is counted along with the last
text of its row. Positions of shape `[1, tokens]` hold for all rows.
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
    """The number of each token's text; texts are numbered from 0, row by row."""
    starts = (positions == 0).expand(num_rows, -1)
    return starts.flatten().cumsum(0).view(starts.shape) - 1


def text_lengths(numbers: Int[Tensor, "rows tokens"]) -> list[int]:
    """The number of tokens of each text; padding counts to the last text of its row."""
    lengths: list[int] = numbers.flatten().bincount().tolist()
    return lengths


def same_text(positions: Int[Tensor, "_ tokens"]) -> Bool[Tensor, "_ tokens tokens"]:
    """Whether two tokens of a row belong to one text."""
    numbers = (positions == 0).cumsum(-1)
    return numbers[:, :, None] == numbers[:, None, :]


def unpack(
    values: Shaped[Tensor, "rows tokens *rest"],
    numbers: Int[Tensor, "rows tokens"],
    positions: Int[Tensor, "_ tokens"],
) -> Shaped[Tensor, "texts longest *rest"]:
    """Give every text a row of its own, padded with zeros; `unpack(...)[numbers, positions]` packs them again."""
    num_texts, longest = int(numbers[-1, -1]) + 1, int(positions.max()) + 1
    texts = values.new_zeros(num_texts, longest, *values.shape[2:])
    return texts.index_put((numbers, positions.expand_as(numbers)), values)
