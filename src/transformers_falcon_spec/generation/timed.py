"""Timed runs of `generate`, seeded, with or without a drafter, and the statistics of stock assisted generation."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.stats import GenerationStats
from ..errors import GenerationError
from ..transformers_versions import CACHE
from .adapters import unwrapped
from .model_parts import cuda_devices, device_of, num_embeddings

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One call of `generate`: its whole output, the new token ids of its first row, and its seconds."""

    output: Any
    new_ids: list[int]
    seconds: float


def check_known(input_ids: Tensor, target: PreTrainedModel) -> None:
    """Refuse ids without an embedding, before a GPU ends the process for them: [`GenerationError`]."""
    num_known = num_embeddings(target)
    largest = int(input_ids.max())
    if largest >= num_known:
        raise GenerationError(
            f"A prompt must hold tokens of the target, which has {num_known}, but its tokenizer gives the id "
            f"{largest}. Put the target's own tokenizer into its folder."
        )


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
    """Call `generate` for one text, or a padded batch, from a seed, and time it; `arguments` go to `generate`."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    device = device_of(target)
    check_known(input_ids, target)
    inputs = {"input_ids": input_ids.to(device), "attention_mask": mask.to(device)}
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


@dataclass
class ForwardWatch:
    """The forwards of one model inside a call: their start, seconds, tokens read and tokens in the cache before."""

    starts: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_read: list[int] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Count the forwards of `model` inside."""
        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        with before, model.register_forward_hook(self._after):
            yield

    def _before(self, _module: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
        cache, read = kwargs.get(CACHE), kwargs.get("input_ids")
        self.num_read.append(0 if read is None else read.shape[1])  # DFlash drafters read embeddings
        self.num_cached.append(0 if cache is None else int(cache.get_seq_length()))
        synchronize()
        self.starts.append(time.perf_counter())

    def _after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        synchronize()
        self.seconds.append(time.perf_counter() - self.starts[-1])


def watched_stats(
    target: PreTrainedModel,
    input_ids: Tensor,
    max_new_tokens: int,
    options: Options,
    seed: int,
    arguments: Mapping[str, Any],
) -> GenerationStats:
    """Counts and seconds of one stock call, in the terms of the package's own loop.

    Stock assisted generation returns no statistics, so the same call is made once more with hooks that count and time
    forwards. The target's first one, and what was drafted for it, count as the prefill; each other one is a step.
    """
    reads, drafts = ForwardWatch(), ForwardWatch()
    assistant = arguments.get("assistant_model")

    with ExitStack() as hooks:
        hooks.enter_context(reads.on(unwrapped(target)))
        if assistant is not None:
            hooks.enter_context(drafts.on(unwrapped(assistant)))
        run = timed_generate(target, input_ids, max_new_tokens, options, seed, **arguments)

    stats = _counts(reads, input_ids.shape[1], len(run.new_ids))
    timed = list(zip(drafts.starts, drafts.seconds, strict=True))
    first_draft_seconds = math.fsum(seconds for start, seconds in timed if start < reads.starts[0])
    stats.prefill_seconds = reads.seconds[0] + first_draft_seconds
    stats.draft_seconds = math.fsum(drafts.seconds) - first_draft_seconds
    stats.num_passes = sum(start >= reads.starts[0] for start in drafts.starts)
    stats.verify_seconds = math.fsum(reads.seconds[1:])
    stats.total_seconds = run.seconds
    return stats


def _counts(reads: ForwardWatch, prompt_len: int, num_tokens: int) -> GenerationStats:
    stats = GenerationStats(num_tokens=num_tokens)
    committed = [prompt_len, *(cached + 1 for cached in reads.num_cached[1:]), prompt_len + num_tokens]
    for step in range(1, len(reads.seconds)):
        num_candidates = reads.num_cached[step] + reads.num_read[step] - committed[step]
        num_accepted = committed[step + 1] - committed[step] - 1
        is_last = step == len(reads.seconds) - 1  # what lies below the last token was never asked for
        max_depth = num_accepted if is_last else num_candidates
        stats.record(num_nodes=num_candidates + 1, max_depth=max_depth, num_accepted=num_accepted)
    return stats
