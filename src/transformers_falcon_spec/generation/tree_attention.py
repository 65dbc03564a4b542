"""The attention with which a target reads trees: one that takes a mask, and does not copy the cache for it."""

import inspect
import re
import sys
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import TargetError
from .model_parts import in_layers, once_a_model
from .modes import attribute_set

GROUPED_SDPA = "falcon_spec_grouped_sdpa"
_UNUSUAL = ("position_bias", "softcap", "s_aux", "cache", "output_attentions")  # that only the stock function takes
_NEUTRAL = {"torch", "builtins", "typing", "abc", "peft", "accelerate", "transformers", "transformers_falcon_spec"}
_MODELS = "transformers.models."  # of which each file is code of a model
_LOOK_UP = re.compile(r"get_interface\(\s*(self\.)?(text_)?config\._attn_implementation\b")


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute SDPA as Transformers does, but without copying the cache for query heads that share keys and values.

    Under a mask Transformers makes that copy, as GPUs have no fast kernel without it. Here the heads that share keys
    become queries of one head, unless a CPU has more threads than heads are left then: its own kernel shares them out.
    """
    is_odd = key.shape[-1] != value.shape[-1]
    for name in _UNUSUAL:
        is_odd = is_odd or kwargs.get(name) is not None
    if attention_mask is None or is_odd or query.device.type not in {"cpu", "cuda"}:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)

    is_compiling = torch.compiler.is_compiling()  # which cannot ask for the number of threads
    if query.device.type == "cuda" or is_compiling or key.shape[0] * key.shape[1] >= torch.get_num_threads():
        states = folded_sdpa(query, key, value, attention_mask, dropout, scaling)
    else:
        states = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )

    return states.transpose(1, 2).contiguous(), None


def folded_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float = 0.0, scaling: float | None = None
) -> Tensor:
    """SDPA with the query heads that share keys as queries of one head, so that each key is read once.

    `query` is `[rows, heads, nodes, size]`, as is what comes back; `key` and `value` are `[rows, groups, slots, size]`
    and `mask` `[rows or 1, heads or 1, nodes, slots]`.
    """
    folded = query.reshape(*key.shape[:2], -1, query.shape[-1])
    num_folded = folded.shape[2] // query.shape[2]  # heads that share keys
    masks: Tensor | None = mask if num_folded == 1 else getattr(mask, "folded", None)

    if masks is None or masks.shape[2] != folded.shape[2]:  # made once for all layers that get this mask
        by_head = mask.expand(-1, num_folded, -1, -1) if mask.shape[1] == 1 else mask
        masks = by_head.reshape(len(mask), -1, folded.shape[2], mask.shape[3])
        if not torch.compiler.is_compiling():
            mask.folded = masks  # type: ignore[attr-defined]

    states = functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=masks, dropout_p=dropout, scale=scaling
    )
    return states.reshape(query.shape)


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)


def tree_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Inside, `model` reads with [`attention_of_trees`]; threads that use the model share the setting."""
    return attribute_set(model.config.get_text_config(decoder=True), "_attn_implementation", attention_of_trees(model))


def attention_of_trees(model: PreTrainedModel) -> str | None:
    """The name of the attention by which `model` reads tree masks.

    Where the code of a model asks for the name of its attention, that stays as it is.
    """
    config = model.config.get_text_config(decoder=True)
    implementation: str = config._attn_implementation or ""
    num_heads, num_groups = in_layers(config, "num_attention_heads"), in_layers(config, "num_key_value_heads")
    if "flash" in implementation or "flex" in implementation:  # flex crashes the process on a CPU
        if asks_for_name(model):
            raise TargetError(
                f"`{type(model).__name__}` asks for the name of its attention, and {implementation!r} takes no mask "
                'of a tree. Load it with `attn_implementation="sdpa"` or `"eager"`.'
            )

        implementation = "sdpa" if model._supports_sdpa else "eager"
    elif (
        implementation == "sdpa" and num_groups != num_heads and any(num_groups) and model._supports_attention_backend
    ):
        is_stock = ALL_ATTENTION_FUNCTIONS[implementation] is sdpa_attention_forward  # no function of the caller's
        implementation = GROUPED_SDPA if is_stock and not asks_for_name(model) else implementation

    return implementation or None


def check_mask_is_stock(model: PreTrainedModel) -> None:
    """Refuse a target whose attention has a mask by a function of the caller's, of which a tree's mask knows nothing.

    Raises:
        [`TargetError`]: it has one.
    """
    implementation = model.config.get_text_config(decoder=True)._attn_implementation or ""
    function = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation, sdpa_mask)
    if function.__module__ != sdpa_mask.__module__:
        raise TargetError(
            f"The mask of a tree must be all that its nodes see, but the attention {implementation!r} makes masks by "
            f"the function `{function.__module__}.{function.__qualname__}`."
        )


@once_a_model
def asks_for_name(model: PreTrainedModel) -> bool:
    """Whether code of a model does more with the name of its attention than look up the function behind it."""
    for part in model.modules():
        for kind in type(part).__mro__:
            name = kind.__module__
            is_own = name.startswith(_MODELS) or name.split(".")[0] not in _NEUTRAL
            if is_own and _asks_for_name(name):
                return True
    return False


@cache
def _asks_for_name(module: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return True  # nobody knows
    return "_attn_implementation" in _LOOK_UP.sub("", source)
