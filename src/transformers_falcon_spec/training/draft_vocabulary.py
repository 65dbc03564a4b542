"""The draft vocabulary: the tokens that the assistant uses most often in the training data."""

from collections.abc import Iterable

import torch

from ..errors import OptionError
from .dataset import Example


def most_frequent_tokens(examples: Iterable[Example], vocab_size: int, num_tokens: int) -> list[int]:
    """The `num_tokens` ids that the assistant uses most often in `examples`, ascending; ties go to lower ids.

    Raises:
        [`OptionError`]: the vocabulary is smaller than that.

    Example:

    ```python
    >>> example = {"input_ids": [9, 9, 9, 4, 2, 4, 7], "assistant_mask": [0, 0, 0, 1, 1, 1, 1]}
    >>> most_frequent_tokens([example], vocab_size=10, num_tokens=2)
    [2, 4]

    ```
    """
    if not 1 <= num_tokens <= vocab_size:
        raise OptionError(f"A draft vocabulary must have 1 to {vocab_size} tokens, but {num_tokens} are asked for.")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for example in examples:
        is_assistant = torch.as_tensor(example["assistant_mask"], dtype=torch.bool)
        counts += torch.bincount(torch.as_tensor(example["input_ids"])[is_assistant], minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:num_tokens].sort().values.tolist()
