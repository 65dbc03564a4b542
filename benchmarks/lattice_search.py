"""What searching a diffusion draft costs: microseconds of each part by draft length, for usual lattices and for full ones.

Command: python -m benchmarks.lattice_search. Hardware and time: one CPU core, half a minute. Tokens of the text come as
often as 1 / rank, each on its own, so that the proxy has seen most contexts that it is asked about. Prints a line of JSON for each length
and kind of lattice; nothing is written. `path` is scores and beam of 3, with a proxy that has read a million tokens and the context;
`prune` takes logits of the whole vocabulary.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformers_falcon_spec.drafters.diffuspec.lattice import prune
from transformers_falcon_spec.drafters.diffuspec.path_search import mixed_scores, search_path, tree_over
from transformers_falcon_spec.drafters.diffuspec.proxy import NgramProxy

NUM_WARM_UP = 20
NUM_NEW = 4  # tokens that a step adds to the context
NUM_NODES = 16
FLATNESS = 0.6  # about five candidates a place


def zipf_text(num_tokens: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Tokens whose frequencies fall as 1 / rank."""
    weights = 1 / torch.arange(1, vocab_size + 1, dtype=torch.double)
    return torch.multinomial(weights, num_tokens, replacement=True, generator=generator)


def draft_logits(text: Tensor, vocab_size: int, flatness: float, generator: torch.Generator) -> Tensor:
    """Logits `[1, places, vocab]` that like the text, by as much as chance has it; flat where `flatness` is large."""
    logits = torch.randn(1, len(text), vocab_size, generator=generator)
    liking = 12 / flatness * torch.rand(len(text), generator=generator)
    logits[0, torch.arange(len(text)), text] += liking
    frequent = torch.arange(vocab_size) < 20  # noqa: PLR2004  what a model guesses where it knows nothing
    return logits + 6 * frequent / flatness


def microseconds(run: Callable[[], Any], repeats: int) -> float:
    """The least of a call, in time of the processor: whatever else runs only adds to it."""
    seconds = []
    for number in range(NUM_WARM_UP + repeats):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start if number >= NUM_WARM_UP else 0.0)
    return round(1e6 * min(seconds[NUM_WARM_UP:]), 1)


def measure(proxy: NgramProxy, text: Tensor, logits: Tensor, tau: float, repeats: int) -> dict[str, float]:
    """Microseconds of each part of one draft."""
    own = proxy.in_context()
    own.update(text[: -logits.shape[1]].tolist())
    lattice = prune(logits, tau)
    history: Sequence[int] = text[-logits.shape[1] - 2 : -logits.shape[1]].tolist()
    parts: dict[str, Callable[[], Any]] = {
        "prune": lambda: prune(logits, tau),
        "path": lambda: search_path(lattice, mixed_scores(lattice, own, history), 3),
        "tree": lambda: tree_over(lattice, mixed_scores(lattice, own, history), history[-1], NUM_NODES),
        "update": lambda: own.update(text[:NUM_NEW].tolist()),
    }
    found = {name: microseconds(run, repeats) for name, run in parts.items()}
    return {"candidates": round(float(lattice.num.double().mean()), 2), **found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 30])
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--num_tokens", type=int, default=1_000_000)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    proxy = NgramProxy.fit([zipf_text(args.num_tokens, args.vocab_size, generator)], 3, args.vocab_size)
    for length in args.lengths:
        text = zipf_text(args.context + length, args.vocab_size, generator)
        logits = draft_logits(text[-length:], args.vocab_size, FLATNESS, generator)
        for kind, tau in (("usual", 0.8), ("full", 1.0)):
            row = {"length": length, "lattice": kind, **measure(proxy, text, logits, tau, args.repeats)}
            print(json.dumps(row))


if __name__ == "__main__":
    main()
