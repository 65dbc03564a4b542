"""Statistics of stock assisted generation, counted by hooks on the target and its assistant in a run that is not timed.

Stock assisted generation returns no statistics, and a timed stock run must have no code of this package in its path.
So the same call is made once more, from the same seed, with hooks that count and time the forwards.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.stats import GenerationStats
from .adapters import unwrapped
from .timed import Options, synchronize, timed_generate


class _Watch:
    """Forwards of one model inside a call: when each began, how long it took, how many tokens it read and found in the cache."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.seconds: list[float] = []
        self.num_read: list[int] = []
        self.num_cached: list[int] = []

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Count the forwards of `model` inside."""
        handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, _module: nn.Module, _args: Any, kwargs: Mapping[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        read = kwargs.get("input_ids")
        self.num_read.append(
            0 if read is None else read.shape[1]
        )  # DFlash drafters read embeddings; nobody asks how many
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

    A step is a forward of the target after the first one; it reads the newest committed token and a chain of
    candidates. The first forward reads the prompt and, unlike the package's own, the first candidates with it: it and
    what was drafted for it count as the prefill. `draft_seconds` are those of the assistant's forwards; the code
    around them is in `other_seconds`. The call is made as the caller's context has it.
    """
    reads, drafts = _Watch(), _Watch()
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
    stats.verify_seconds = math.fsum(reads.seconds[1:])
    stats.total_seconds = run.seconds
    return stats


def _counts(reads: _Watch, prompt_len: int, num_tokens: int) -> GenerationStats:
    """The counts of each step, derived from how far the cache grew from one forward to the next."""
    stats = GenerationStats(num_tokens=num_tokens)
    committed = [prompt_len, *(cached + 1 for cached in reads.num_cached[1:]), prompt_len + num_tokens]
    for step in range(1, len(reads.seconds)):
        num_candidates = reads.num_cached[step] + reads.num_read[step] - committed[step]
        num_accepted = committed[step + 1] - committed[step] - 1
        is_last = step == len(reads.seconds) - 1  # what lies below the last token was never asked for
        max_depth = num_accepted if is_last else num_candidates
        stats.record(num_nodes=num_candidates + 1, max_depth=max_depth, num_accepted=num_accepted)
    return stats
