"""Where the time of a drafted step goes: models, lists of the drafter, and everything else, for trees of one size.

Command: python -m benchmarks.bookkeeping; with --shape 0.3b --dtype bfloat16 on an inflated pair. Hardware and time: two CPU cores and nothing else running, about two minutes.
Writes `benchmarks/results/bookkeeping.json`, which `falcon-spec report` renders into docs/tuning.md.
"""

import argparse
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import logging

from benchmarks.budgets import add_pair, load_pair
from benchmarks.choose_tree import shape_options
from transformers_falcon_spec.drafters.falcon.candidates import FalconCandidateGenerator
from transformers_falcon_spec.drafters.falcon.modeling_falcon import FalconSpecDrafter, Transition
from transformers_falcon_spec.evaluation.decoding import decoding_options
from transformers_falcon_spec.evaluation.prompts import read_prompts
from transformers_falcon_spec.evaluation.summary import bootstrap
from transformers_falcon_spec.generation.loop import SpeculativeDecoding
from transformers_falcon_spec.generation.target import Target
from transformers_falcon_spec.generation.timed import timed_generate
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
PARTS: dict[str, list[tuple[type, str]]] = {
    "prefill": [(SpeculativeDecoding, "prefill"), (Target, "prefill")],
    "target": [(Target, "read")],
    "drafter": [
        (FalconSpecDrafter, "recur"),
        (FalconSpecDrafter, "attend"),
        (Transition, "forward"),
        (Target, "embed"),
        (Target, "head"),
    ],
    "lists": [(FalconCandidateGenerator, "log_node_probs")],
}

SHARES = ("target", "drafter", "lists")


class Clock:
    """Seconds by part; time inside a part that another one calls counts for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time counts for `part`."""

        @functools.wraps(function)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            _wait()
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                _wait()
                spent = time.perf_counter() - start
                self.seconds[part] += spent - self._inner.pop()
                self._inner[-1] += spent

        return clocked

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, every function of `PARTS` is timed."""
        with ExitStack() as stack:
            for part, functions in PARTS.items():
                for owner, name in functions:
                    stack.enter_context(patch.object(owner, name, self.timed(part, getattr(owner, name))))
            yield


def _wait() -> None:
    """Let a device finish, so that its work counts where it was asked for."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def main() -> None:
    """Write texts and add up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair(parser)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--decodings", nargs="+", default=["greedy", "temperature-0.7"])
    parser.add_argument("--prompts", nargs="+", default=[str(HERE / "prompts" / "held_out.jsonl")])
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    output = args.output or HERE / "results" / f"bookkeeping{f'_{args.shape}' if args.shape else ''}.json"
    target, tokenizer, drafter = load_pair(args)
    texts = [prompt.input_ids(tokenizer) for prompt in read_prompts(args.prompts, args.limit)]
    rows = []
    for num_nodes in args.nodes:
        drafter.generation_config = shape_options("grown", drafter, num_nodes, num_passes=2)
        for decoding in args.decodings:
            options = decoding_options(decoding)
            timed_generate(target, texts[0], 16, options, 0, drafter)  # warm up
            runs = [_run(target, ids, args.max_new_tokens, options, drafter) for ids in texts]
            rows.append({"num_nodes": num_nodes, "decoding": decoding, **_summary(runs)})
            print(rows[-1])
    origin = provenance(seed=0, **{name: str(value) for name, value in vars(args).items()})
    output.write_text(json.dumps({"provenance": origin, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _run(target: Any, ids: torch.Tensor, max_new_tokens: int, options: Any, drafter: Any) -> dict[str, float]:
    """Seconds of one text by part; all that no part claims is bookkeeping."""
    clock = Clock()
    with clock.running():
        stats = timed_generate(target, ids, max_new_tokens, options, 0, drafter).output.speculation
    parts = {part: clock.seconds[part] for part in SHARES}
    total = stats.total_seconds - stats.prefill_seconds
    return {**parts, "bookkeeping": total - sum(parts.values()), "total": total, "steps": stats.num_steps}


def _summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Shares of the time after the prompts were read, with intervals over texts."""
    total, steps = (sum(run[name] for run in runs) for name in ("total", "steps"))
    found: dict[str, Any] = {"milliseconds_a_step": 1e3 * total / steps}
    for part in (*SHARES, "bookkeeping"):
        pairs = [(run[part], run["total"]) for run in runs]
        found[part] = {"share": _share(pairs), "interval": bootstrap(pairs, _share, seed=0)}
    return found


def _share(pairs: list[tuple[float, float]]) -> float:
    return sum(spent for spent, _ in pairs) / sum(total for _, total in pairs)


if __name__ == "__main__":
    main()
