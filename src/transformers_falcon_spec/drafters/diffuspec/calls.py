"""The call of a diffusion model's forward, with an attention mask, positions, and a cache where one is kept."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...core.masks import additive
from ...errors import OptionError
from .configuration_diffuspec import DiffusionConfig
from .visibility import visible

NEEDED = ("attention_mask", "position_ids")  # arguments that the forward must know
_HEADS = ("logits_to_keep", "num_logits_to_keep")  # what models call the number of last rows that the head reads
_LEAST_TOKENS = 6  # before and behind the masks' position
_SHARE = 1e-4  # of what a token says of itself; less than that is rounding


@dataclass(frozen=True)
class ModelCall:
    """One pass over a text: what is read, who sees whom, and how many rows of logits are asked for.

    Args:
        token_ids (`torch.Tensor` of shape `(rows, tokens)`): Tokens to be read.
        positions (`torch.Tensor` of shape `(rows, tokens)`): Where they stand in the text.
        allowed (`torch.Tensor` of shape `(rows, tokens, slots)`): What each one sees, cached slots first.
        cache ([`~transformers.Cache`], *optional*): Keys and values of what was read before; all of these tokens are
            added.
        num_rows (`int`): Rows of logits that are asked for, the last ones.
    """

    token_ids: Tensor
    positions: Tensor
    allowed: Tensor
    cache: Any | None
    num_rows: int

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of the forward in this type; its mask is 0 where a token sees, and the lowest number elsewhere."""
        return {
            "input_ids": self.token_ids,
            "attention_mask": additive(self.allowed, dtype),
            "position_ids": self.positions,
            "past_key_values": self.cache,
            "use_cache": self.cache is not None,
        }

    def logits(self, model: PreTrainedModel) -> Tensor:
        """Logits `[rows, num_rows, vocab]` in float32 over the model's ids."""
        known = inspect.signature(model.forward).parameters
        heads = {name: self.num_rows for name in _HEADS if name in known}
        outputs = model(**self.arguments(model.dtype), **heads)
        found: Tensor = (
            outputs[0] if isinstance(outputs, tuple) else outputs.logits
        )  # as `return_dict` of its config says
        return found[:, -self.num_rows :].float()


def check_forward(model: PreTrainedModel) -> None:
    """Refuse a model whose forward takes no masks or no positions.

    Raises:
        [`OptionError`]: it is one.
    """
    known = inspect.signature(model.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    missing = [name for name in NEEDED if name not in known and not takes_all]
    if missing:
        raise OptionError(
            f"`{type(model).__name__}.forward` must take {', '.join(f'`{name}`' for name in NEEDED)}, but it lacks "
            f"{', '.join(f'`{name}`' for name in missing)}. A diffusion model is told who sees whom: take one that "
            "can be."
        )


@torch.no_grad()
def check_attention(model: PreTrainedModel, config: DiffusionConfig, device: torch.device) -> None:
    """Refuse a model that does not attend as configured: a later token is changed, and early rows are compared.

    Raises:
        [`OptionError`]: with full attention a later token says nothing to an earlier one, or with another kind it
            does.
    """
    if device.type == "meta":
        return
    size = max(_LEAST_TOKENS, config.block_size or 0)
    positions = torch.arange(2 * size, device=device)
    seen = visible(config.attention, size, config.block_size, positions, positions)[None]
    texts = [torch.zeros_like(positions).index_fill(0, positions[-1:], token)[None] for token in (1, 2)]
    first, second = (ModelCall(text, positions[None], seen, None, 2 * size).logits(model)[0] for text in texts)
    changes = (first - second).abs().amax(dim=-1)
    leaks = bool(changes[: size - 1].max() > _SHARE * changes[-1])
    if leaks != (config.attention == "full"):
        raise OptionError(
            f"With `attention={config.attention!r}` the first tokens of a text must{' not' if leaks else ''} see the "
            f"last one, but in a `{type(model).__name__}` they {'do' if leaks else 'do not'}. Choose another "
            '`attention`, or load the model with `attn_implementation="sdpa"`.'
        )
