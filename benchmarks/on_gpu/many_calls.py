"""What many short calls of all kinds leave behind: memory of graphs and buffers, and anything in the model."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.batches import padded
from transformers_falcon_spec.generation.timed import timed_generate

from .cells import EMBEDDED, OPTIONS, Way
from .pairs import Pair
from .phases import watched_work

NUM_SAMPLES = 20  # moments at which memory is read
WAYS = (Way(EMBEDDED, captures=True), Way("lookahead", captures=True))
DECODINGS = ("greedy", "temperature-1", "temperature-0.7")
ROWS, NEW_TOKENS = (1, 2, 4), (8, 24, 48)


def mixed_calls(pair: Pair, prompts: Sequence[Tensor], num_calls: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Make calls of random drafter, rows, length and decoding; after each twentieth, gives what all so far left behind."""
    draws, samples = random.Random(seed), []
    methods = [pair.method(way, 0) for way in WAYS]
    before = contents(pair.target)
    with watched_work(pair.device) as watch:
        for number in range(1, num_calls + 1):
            ids, mask = padded(draws.sample(list(prompts), draws.choice(ROWS)), pair.tokenizer.pad_token_id)
            options, method = OPTIONS[draws.choice(DECODINGS)], draws.choice(methods)
            num_new = draws.choice(NEW_TOKENS)
            timed_generate(pair.target, ids, num_new, options, number, attention_mask=mask, **method.arguments())
            if number % max(num_calls // NUM_SAMPLES, 1) and number < num_calls:
                continue
            samples.append({"num_calls": number, **memory(pair.device)})
            watch.marks.clear()
            yield {
                "samples": [*samples],
                "left_in_model": sorted(contents(pair.target) - before),
                "num_captures": watch.num_captures,
                "num_calls": number,
                "is_complete": number == num_calls,
            }


def memory(device: torch.device) -> dict[str, int | None]:
    """Bytes of live tensors and of what the allocator holds; None where there is no device memory."""
    if device.type != "cuda":
        return {"allocated_bytes": None, "reserved_bytes": None}
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"allocated_bytes": allocated, "reserved_bytes": reserved}


def contents(model: nn.Module) -> set[str]:
    """Attributes, buffers and hooks of every module, by name."""
    found = set()
    for name, module in model.named_modules():
        found |= {f"{name}.{attribute}" for attribute in vars(module)}
        for kind in ("_buffers", "_forward_hooks", "_forward_pre_hooks"):
            found |= {f"{name}.{kind}.{key}" for key in getattr(module, kind)}
    return found
