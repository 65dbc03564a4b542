"""The call of a diffusion model's forward: what is read, who sees whom, and how many rows of logits are asked for."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from ...core.masks import additive
from ...transformers_versions import cache_name

_HEADS = ("logits_to_keep", "num_logits_to_keep")  # what models call the number of last rows that the head reads


@dataclass(frozen=True)
class ModelCall:
    """One pass over a text."""

    token_ids: Tensor  # [rows, tokens] to be read
    positions: Tensor  # [rows, tokens] in the text
    allowed: Tensor  # [rows, tokens, slots] what each token sees, cached slots first
    cache: Any | None  # keys and values of what was read before; those of all these tokens are added
    num_rows: int  # rows of logits that are asked for, the last ones

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """Arguments of the forward of this model, with the mask in its type."""
        return {
            "input_ids": self.token_ids,
            "attention_mask": additive(self.allowed, model.dtype),
            "position_ids": self.positions,
            cache_name(model.forward): self.cache,
            "use_cache": self.cache is not None,
        }

    def logits(self, model: PreTrainedModel) -> Tensor:
        """Logits `[rows, num_rows, vocab]` in float32 over the model's ids."""
        known = inspect.signature(model.forward).parameters
        heads = {name: self.num_rows for name in _HEADS if name in known}
        outputs = model(**self.arguments(model), **heads)
        logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs.logits  # as the model's config says
        return logits[:, -self.num_rows :].float()


def visible(
    attention: str,
    num_committed: int,
    block_size: int | None,
    queries: Int[Tensor, " queries"],
    keys: Int[Tensor, " keys"],
) -> Bool[Tensor, "queries keys"]:
    """Which keys each query sees, both given as positions in the text; masks stand from `num_committed` on.

    `attention` and `block_size` are those of [`DiffusionConfig`].

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
    return keys // block_size <= queries[:, None] // block_size
