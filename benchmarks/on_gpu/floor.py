"""The memory floor: the bytes that a step must read at least, over the bandwidth that a copy reaches on the same machine."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from transformers_falcon_spec.generation.timed import synchronize

REPEATS = 20
BYTES = {"cuda": 2**31, "cpu": 2**28}  # of the buffer that is copied: far above any cache


def copy_bandwidth(
    device: torch.device, num_bytes: int | None = None, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes a second, read and written, of a copy from the device's memory to itself: the median of some."""
    source = torch.zeros(num_bytes or BYTES[device.type], dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(REPEATS):
        synchronize()
        start = clock()
        target.copy_(source)
        synchronize()
        seconds.append(clock() - start)

    return 2 * source.numel() / median(seconds)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that one forward reads: all but tables that are looked up and do not serve as a head."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    looked_up -= {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return sum(each.numel() * each.element_size() for each in model.parameters() if id(each) not in looked_up)


def head_bytes(target: PreTrainedModel) -> int:
    """Bytes of the target's head."""
    weight: Any = target.get_output_embeddings().weight  # type: ignore[operator]  # declared as a module or a tensor
    return int(weight.numel() * weight.element_size())


def token_bytes(model: Any) -> int:
    """Bytes of keys and values of one token in all layers of a target or drafter; 0 for one without layers."""
    config = getattr(model.config, "draft_config", model.config).get_text_config(decoder=True)  # of a whole model
    num_heads = getattr(config, "num_attention_heads", 0)
    if not num_heads:
        return 0
    size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return int(2 * config.num_hidden_layers * (config.num_key_value_heads or num_heads) * size * model.dtype.itemsize)


def uses_target_head(drafter: Any) -> bool:
    """Whether a pass of the drafter reads the target's head: it has features to read and no head of its own."""
    config = drafter.config
    has_own = getattr(config, "has_lm_heads", False) or getattr(config, "version", 1) != 1 or hasattr(drafter, "model")
    return bool(drafter.feature_layers) and not has_own


def step_bytes(target: PreTrainedModel, drafter: Any, *, rows: int, text_len: float, num_passes: float) -> float:
    """Bytes that a step reads at least: the target once, and each drafter pass with the head that it needs.

    Args:
        target ([`~transformers.PreTrainedModel`]): Its weights, and keys and values of the text, are read once.
        drafter ([`DrafterModel`] or None): Its weights, and its keys and values, are read in every pass.
        rows (`int`): Of the batch.
        text_len (`float`): Mean tokens of a row during the steps.
        num_passes (`float`): Mean drafter passes of a step.
    """
    read = weight_bytes(target) + rows * text_len * token_bytes(target)
    if drafter is None or not isinstance(drafter, nn.Module):  # drafters without weights read none
        return read
    head = head_bytes(target) if uses_target_head(drafter) else 0
    return read + num_passes * (weight_bytes(drafter) + head + rows * text_len * token_bytes(drafter))
