"""What to pass for each argument of a target's `forward`, so that plain decoding writes another text where it can."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tests.tiny import make_prompt
from transformers_falcon_spec.transformers_versions import CACHE

LENGTH = 12
SEEN = {"token_type_ids", "attention_mask"}  # must change the text of every target that reads them
Options = dict[str, Any]


def prompts(rows: int) -> Tensor:
    """Prompts of equal length."""
    return torch.cat([make_prompt(LENGTH, seed) for seed in range(rows)])


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(0))


def _types(rows: int) -> Tensor:
    return torch.randint(1, 9, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def _mask(rows: int) -> Tensor:
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    return mask


def _cache(target: Any, rows: int) -> Callable[[], Options]:
    """A fresh cache that has read a part of the prompts."""

    def make() -> Options:
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            target(prompts(rows)[:, :5], past_key_values=cache, use_cache=True)
        return {CACHE: cache}

    return make


VALUES: dict[str, Callable[[Any, int], Options]] = {
    "attention_mask": lambda _, rows: {"attention_mask": _mask(rows)},
    "position_ids": lambda _, rows: {"position_ids": 3 * torch.arange(LENGTH).expand(rows, -1)},
    "token_type_ids": lambda _, rows: {"token_type_ids": _types(rows)},
    CACHE: lambda target, rows: {"make": _cache(target, rows)},
    "inputs_embeds": lambda _, rows: {"inputs_embeds": _numbers(rows, LENGTH, 64)},
    "labels": lambda _, rows: {"labels": prompts(rows)},
    "use_cache": lambda _, rows: {"use_cache": rows > 0},
    "logits_to_keep": lambda _, rows: {"logits_to_keep": 0},
    "output_attentions": lambda _, rows: {"output_attentions": True},
    "output_hidden_states": lambda _, rows: {"output_hidden_states": True},
    "output_router_logits": lambda _, rows: {"output_router_logits": True},
    "encoder_hidden_states": lambda _, rows: {"encoder_hidden_states": _numbers(rows, 5, 64)},
    "encoder_attention_mask": lambda _, rows: {"encoder_attention_mask": torch.ones(rows, 5)},
    "per_layer_inputs": lambda _, rows: {"per_layer_inputs": _numbers(rows, LENGTH, 4, 8)},
    "is_causal": lambda _, rows: {"is_causal": False},
    "num_items_in_batch": lambda _, rows: {"num_items_in_batch": torch.tensor(3)},
    "seq_idx": lambda _, rows: {"seq_idx": _types(rows).int()},
    "cu_seq_lens_q": lambda _, rows: {"cu_seq_lens_q": torch.tensor([0, 5, LENGTH], dtype=torch.int)},
    "cu_seq_lens_k": lambda _, rows: {"cu_seq_lens_k": torch.tensor([0, 5, LENGTH], dtype=torch.int)},
    "max_length_q": lambda _, rows: {"max_length_q": 7},
    "max_length_k": lambda _, rows: {"max_length_k": 7},
}
