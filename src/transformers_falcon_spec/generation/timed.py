"""One timed run of `generate`, seeded, with or without a drafter: both sides of every comparison make this call."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .model_parts import cuda_devices

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One call of `generate`: the whole dict it returned, the new token ids of its first row, and the seconds it took."""

    output: Any
    new_ids: list[int]
    seconds: float


def timed_generate(
    target: PreTrainedModel,
    input_ids: Tensor,
    max_new_tokens: int,
    options: Options,
    seed: int,
    assistant_model: nn.Module | None = None,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> Run:
    """Write one text, or a padded batch, seeded, with or without a drafter; which is otherwise the same call.

    `arguments` go to `generate`.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    inputs = {"input_ids": input_ids.to(target.device), "attention_mask": mask.to(target.device)}
    with torch.random.fork_rng(devices=cuda_devices(target)):
        torch.manual_seed(seed)
        synchronize()
        start = time.perf_counter()
        output = target.generate(  # type: ignore[operator]  # `PreTrainedModel` does not declare it
            **inputs,
            **options,
            **arguments,
            max_new_tokens=max_new_tokens,
            assistant_model=assistant_model,
            return_dict_in_generate=True,
        )
        synchronize()
    seconds = time.perf_counter() - start
    return Run(output, output.sequences[0, input_ids.shape[1] :].tolist(), seconds)


def synchronize() -> None:
    """Wait for the device, if this process has used one, so that only finished work is timed."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
