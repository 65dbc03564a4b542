"""Who sees whom in a diffusion model, by kind of attention. Knows nothing of caches."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...core.masks import block_causal_mask, block_ends


def visible(
    attention: str,
    num_committed: int,
    block_size: int | None,
    queries: Int[Tensor, " queries"],
    keys: Int[Tensor, " keys"],
) -> Bool[Tensor, "queries keys"]:
    """Which keys each query sees, both given as positions in the text; masks stand from `num_committed` on.

    Args:
        attention (`str`): `"full"`, `"prefix_causal"` or `"block_causal"`, as [`DiffusionConfig`] says.
        num_committed (`int`): Tokens of the text.
        block_size (`int`, *optional*): Of the grid of `"block_causal"`, which starts at position 0.
        queries (`torch.Tensor` of shape `(queries,)`): Positions of the rows.
        keys (`torch.Tensor` of shape `(keys,)`): Positions of what they may see.

    Example:

    ```python
    >>> positions = torch.arange(4)
    >>> visible("prefix_causal", 2, None, positions, positions).int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]

    ```
    """
    if attention == "full":
        return torch.ones(len(queries), len(keys), dtype=torch.bool, device=queries.device)
    if attention == "prefix_causal":
        return (keys <= queries[:, None]) | (queries >= num_committed)[:, None]
    assert block_size is not None  # the configuration sees to it
    ends = block_ends(queries, block_size, torch.zeros((), dtype=queries.dtype, device=queries.device))
    return block_causal_mask(ends, keys)
