"""How the forward of a diffusion model is called: families differ in the form of masks, in who stores what in a cache, and in names.

What is written here of a family was read in its public code; none of these forms was run on the published weights.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...core.masks import additive
from ...errors import OptionError

_HEADS = ("logits_to_keep", "num_logits_to_keep")  # what models call the number of last rows that the head reads


@dataclass(frozen=True)
class Reading:
    """One pass over a text: what is read, who sees whom, and how many rows are asked for.

    Args:
        token_ids (`torch.Tensor` of shape `(rows, tokens)`): Tokens to be read.
        positions (`torch.Tensor` of shape `(rows, tokens)`): Where they stand in the text.
        allowed (`torch.Tensor` of shape `(rows, tokens, slots)`): What each one sees, cached slots first.
        cache ([`~transformers.Cache`], *optional*): Keys and values of what was read before; all of these tokens are added.
        num_rows (`int`): Rows of logits that are asked for, the last ones.
        block_size (`int`, *optional*): The grid of models that make their own mask.
    """

    token_ids: Tensor
    positions: Tensor
    allowed: Tensor
    cache: Any | None
    num_rows: int
    block_size: int | None = None


@dataclass(frozen=True)
class ModelCall:
    """One form of call.

    Args:
        arguments (`Callable`): What the forward is given, of the model's type and a [`Reading`].
        names (`tuple[str, ...]`): Arguments that the forward must know.
        attention (`tuple[str, ...]`): Ways to attend that such models can be made to follow.
        takes_mask (`bool`): Whether the mask is ours; else the model makes its own.
        takes_cache (`bool`): Whether keys and values can be kept.
    """

    arguments: Callable[[torch.dtype, Reading], dict[str, Any]]
    names: tuple[str, ...]
    attention: tuple[str, ...]
    takes_mask: bool = True
    takes_cache: bool = True

    def __call__(self, model: PreTrainedModel, reading: Reading) -> Tensor:
        """Logits `[rows, num_rows, vocab]` in float32."""
        known = inspect.signature(model.forward).parameters
        heads = {name: reading.num_rows for name in _HEADS if name in known}
        outputs = model(input_ids=reading.token_ids, **self.arguments(model.dtype, reading), **heads)
        logits: Tensor = (
            outputs[0] if isinstance(outputs, tuple) else outputs.logits
        )  # as `return_dict` of its config says
        return logits[:, -reading.num_rows :].float()

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model whose forward is not called in this way.

        Raises:
            [`OptionError`]: an argument is missing.
        """
        known = inspect.signature(model.forward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        missing = [name for name in self.names if name not in known and not takes_all]
        if missing:
            raise OptionError(
                f"`{type(model).__name__}.forward` must take {', '.join(f'`{name}`' for name in self.names)}, but it lacks "
                f"{', '.join(f'`{name}`' for name in missing)}. Choose another `call`, or a `preset`."
            )


def _cached(reading: Reading) -> dict[str, Any]:
    return {"past_key_values": reading.cache, "use_cache": reading.cache is not None}


def _additive(dtype: torch.dtype, reading: Reading) -> dict[str, Any]:
    """Transformers' own models, Dream, A2D, DiffuLLaMA and DiffuGPT: 0 where a token sees, the lowest number elsewhere."""
    mask = additive(reading.allowed, dtype)
    return {"attention_mask": mask, "position_ids": reading.positions, **_cached(reading)}


def _boolean(_dtype: torch.dtype, reading: Reading) -> dict[str, Any]:
    """SDAR: the mask is cast to booleans, which would turn an additive one around, and `store_kv` says whether the cache grows."""
    stores = reading.cache is not None
    return {
        "attention_mask": reading.allowed[:, None],
        "position_ids": reading.positions,
        **_cached(reading),
        "store_kv": stores,
    }


def _own_grid(_dtype: torch.dtype, reading: Reading) -> dict[str, Any]:
    """Fast-dLLM v2: the model makes its mask of `block_size` and of what the cache holds."""
    stores = reading.cache is not None
    return {"update_past_key_values": stores, "block_size": reading.block_size, **_cached(reading)}


def _noise_level(_dtype: torch.dtype, reading: Reading) -> dict[str, Any]:
    """MDLM: `timesteps` is the noise level, which published models were trained to ignore; all see all."""
    return {"timesteps": torch.zeros(len(reading.token_ids), dtype=torch.float, device=reading.token_ids.device)}


def _sampled(dtype: torch.dtype, reading: Reading) -> dict[str, Any]:
    """BD3-LM: the same, and `sample_mode` takes a plain text on the model's own grid instead of a noised beside a clean one."""
    return {**_noise_level(dtype, reading), "sample_mode": True}


CALLS = {
    "additive": ModelCall(_additive, ("attention_mask", "position_ids"), ("full", "prefix_causal", "block_causal")),
    "boolean": ModelCall(
        _boolean, ("attention_mask", "position_ids", "store_kv"), ("full", "prefix_causal", "block_causal")
    ),
    "own_grid": ModelCall(_own_grid, ("update_past_key_values", "block_size"), ("block_causal",), takes_mask=False),
    "noise_level": ModelCall(_noise_level, ("timesteps",), ("full",), takes_mask=False, takes_cache=False),
    "sampled": ModelCall(
        _sampled, ("timesteps", "sample_mode"), ("block_causal",), takes_mask=False, takes_cache=False
    ),
}
