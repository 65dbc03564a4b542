"""DiffuSpec: what an exact prefix cache saves, drafted pass by drafted pass, by the length of the text before it.

Command: python -m benchmarks.diffuspec_cache --drafter FOLDER, one with prefix-causal attention. Hardware and time: two CPU cores and nothing
else running, half a minute. Passes with the cache and passes that read all of the text anew are timed in turns, in random order; both read
`--num_new` tokens that the cache does not hold yet, and draft the same (tests/drafters/diffuspec/test_denoising.py). Writes
`benchmarks/results/diffuspec_cache.json`, which `falcon-spec report` renders into docs/diffuspec.md.
"""

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import logging

from benchmarks.running import Turns, times_as_fast
from transformers_falcon_spec import DiffusionDrafter
from transformers_falcon_spec.commands.loading import load_drafter, load_target
from transformers_falcon_spec.drafters.diffuspec.denoising import DenoisedRow
from transformers_falcon_spec.errors import OptionError
from transformers_falcon_spec.generation.timed import synchronize
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
KEPT, ANEW = "with the cache", "anew"


def main() -> None:
    """Time passes after texts of all lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="models/reference-target")
    parser.add_argument("--drafter", required=True, help="folder of a diffusion drafter that keeps an exact cache")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 128, 256, 512, 896])
    parser.add_argument("--num_new", type=int, default=3, help="tokens that became text since the last pass")
    parser.add_argument("--repeats", type=int, default=60, help="turns that are timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "diffuspec_cache.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    target, _ = load_target(args.target, "float32", args.device)
    drafter: Any = load_drafter(args.drafter, target)
    if not drafter.config.keeps_cache or drafter.config.cache_rounds > 1:
        raise OptionError(f"`{args.drafter}` must keep an exact cache, as drafters with prefix-causal attention do.")
    rows = []
    for context in args.contexts:
        turns = timed_turns(drafter, random_text(context, drafter), args.num_new, args.repeats)
        middle = {
            f"{arm}_seconds": median(turn[name] for turn in turns) for arm, name in (("kept", KEPT), ("anew", ANEW))
        }
        rows.append({"context": context, **middle, "beside": times_as_fast(turns, KEPT, ANEW)})
        print(f"{context:5d} {1000 * rows[-1]['kept_seconds']:.2f} ms, {1000 * rows[-1]['anew_seconds']:.2f} ms anew")
    origin = provenance(seed=0, **{name: str(value) for name, value in vars(args).items()})
    result = {"provenance": origin, "num_places": drafter.block_size, "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def random_text(num_tokens: int, drafter: DiffusionDrafter) -> Tensor:
    """Any tokens `[tokens]`: what a pass takes does not depend on them."""
    size, rng = drafter.config.vocab_size, torch.Generator().manual_seed(0)
    return torch.randint(size, (num_tokens,), generator=rng).to(drafter.device)


@torch.no_grad()
def timed_turns(drafter: DiffusionDrafter, text: Tensor, num_new: int, repeats: int) -> Turns:
    """Seconds of a drafted pass behind a text, with what is kept of its older tokens and without; the first turn, a warm-up, is left out."""
    kept, order = DenoisedRow(drafter), random.Random(0)
    turns = []
    for _ in range(repeats + 1):
        read(kept, text[: len(text) - num_new])  # leaves the keys and values of the older tokens
        rows = {KEPT: kept, ANEW: DenoisedRow(drafter)}
        turns.append({name: seconds(rows[name], text) for name in order.sample([*rows], len(rows))})
    return turns[1:]


def read(row: DenoisedRow, text: Tensor) -> Tensor:
    """A drafted pass behind a text: logits `[places, vocab]`."""
    return row.scores(text, row.drafter.block_size, 1, lambda logits: logits)


def seconds(row: DenoisedRow, text: Tensor) -> float:
    """What a drafted pass takes."""
    synchronize()
    start = time.perf_counter()
    read(row, text)
    synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
