"""Chooses the attention with which a target reads trees: one that takes a mask, and does not copy the cache for it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED_SDPA = "falcon_spec_grouped_sdpa"
_UNUSUAL = ("position_bias", "softcap", "cache", "output_attentions")  # arguments that only the stock function takes


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

    Under a mask Transformers makes that copy, since a GPU has no fast kernel without it. A CPU has one: the same
    numbers up to rounding.
    """
    is_odd = any(kwargs.get(name) is not None for name in _UNUSUAL) or key.shape[-1] != value.shape[-1]
    if attention_mask is None or is_odd or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    states = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return states.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_SDPA, grouped_sdpa)
AttentionMaskInterface.register(GROUPED_SDPA, sdpa_mask)


class TreeAttention:
    """Switches the attention of a target while it reads trees; every thread that uses the model shares the setting.

    Flash and flex attention take no mask of ours, and stock SDPA copies the cache where it gets one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._config = model.config.get_text_config(decoder=True)
        self._lock = threading.Lock()
        self._num_readers = 0
        self._before: str | None = None  # what the owner set
        self._without_flash = "sdpa" if model._supports_sdpa else "eager"
        num_heads, num_groups = (
            getattr(self._config, f"num_{kind}_heads", None) for kind in ("attention", "key_value")
        )
        is_grouped = num_groups is not None and num_groups != num_heads
        self._can_share = is_grouped and bool(model._supports_attention_backend)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Switch the attention for the time of the block; of calls that overlap the last one switches back."""
        with self._lock:
            if not self._num_readers:
                present = self._config._attn_implementation
                self._before = "sdpa" if present == GROUPED_SDPA else present  # of a model that shares this config
                self._switch(self._wanted(self._before))
            self._num_readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_readers -= 1
                if not self._num_readers:
                    self._switch(self._before)

    def _wanted(self, implementation: str | None) -> str | None:
        if any(name in (implementation or "") for name in ("flash", "flex")):  # flex crashes the process on a CPU
            return self._without_flash
        return GROUPED_SDPA if implementation == "sdpa" and self._can_share else implementation

    def _switch(self, implementation: str | None) -> None:
        if implementation != self._config._attn_implementation:
            self._config._attn_implementation = implementation
