"""A check that a diffusion model follows its attention mask: libraries drop masks that they find needless."""

import torch
from transformers import PreTrainedModel

from ...errors import OptionError
from .calls import ModelCall
from .configuration_diffuspec import DiffusionConfig
from .visibility import visible

_LEAST_TOKENS = 6  # before and behind the masks' position
_SHARE = 1e-4  # of what a token says of itself; less than that is rounding


@torch.no_grad()
def check_attention(model: PreTrainedModel, config: DiffusionConfig, device: torch.device) -> None:
    """Refuse a model that does not attend as configured: a later token is changed, and early rows are compared.

    Args:
        model ([`~transformers.PreTrainedModel`]): The diffusion model.
        config ([`DiffusionConfig`]): Says who should see whom.
        device (`torch.device`): Where the model is; one without weights is not looked at.

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
            "`attention`, or load the model with "
            '`attn_implementation="sdpa"`.'
        )
