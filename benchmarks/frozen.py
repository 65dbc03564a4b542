"""What `torch.compile` with frozen weights brings on a CPU beyond packed weights: reads of a few nodes, and a pass of the drafter.

Command: python -m benchmarks.frozen; with --shape 0.3b on an inflated pair. `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2` before it shows what
a processor without AVX-512 would do. Hardware and time: two CPU cores, nothing else running, and a C++ compiler; three minutes, inflated six, of
which compiling takes most; resumes. Each round makes a plain step, and every read and a pass with stock, packed and frozen weights, in random order after the
same text. A pass reads the pairs of a step and drafts a block, head included. Each command adds its case to `benchmarks/results/frozen.json`, which
`python -m benchmarks.report` renders into docs/scale.md.
"""

import argparse
import copy
import functools
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor.utils import fresh_inductor_cache
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList, logging

from benchmarks.budgets import add_pair, load_pair
from benchmarks.packed import CASE, add_case, shown_rows
from benchmarks.report import Report, Result, source_line, table
from benchmarks.tree_cost import binary_tree
from tests.runs import prefilled
from transformers_falcon_spec.evaluation.methods import with_options
from transformers_falcon_spec.evaluation.summary import bootstrap
from transformers_falcon_spec.generation.cache import drop_last, new_cache
from transformers_falcon_spec.generation.drafting import DraftBudget, Kept
from transformers_falcon_spec.generation.loop import SpeculativeDecoding
from transformers_falcon_spec.generation.model_parts import apply_head
from transformers_falcon_spec.generation.packed_linear import AUTO, PackedReads
from transformers_falcon_spec.generation.sequence_batch import SequenceBatch
from transformers_falcon_spec.generation.static.state import TreeBuffers, shown_slots
from transformers_falcon_spec.provenance import provenance

HERE = Path(__file__).parent
BACKEND = "inductor"
STOCK, PACKED, FROZEN = "stock", "packed", "compiled, frozen"
NODES = (1, 4, 16)
PASS, PLAIN = "pass", "plain step"
NUM_NEW = 3  # pairs that a pass reads: what a step wrote
NUM_WARM_UP = 3  # rounds

Round = dict[str, float]  # seconds by what was done


class Pair:
    """A pair that has read a prompt and goes on in fixed shapes; every piece of work leaves it as it was."""

    def __init__(self, model: PreTrainedModel, drafter: Any, context: int) -> None:
        self.model: Any = model
        self.ids = torch.randint(3, 1000, (1, context + max(NODES)), generator=torch.Generator().manual_seed(0))
        self.ids %= model.config.vocab_size
        prompt = self.ids[:, :context]
        options = copy.deepcopy(drafter.generation_config)
        options.step, options.tune = "static", False
        drafter = with_options(drafter, options)
        config = GenerationConfig(max_length=context + 64)
        batch = SequenceBatch(prompt, None, LogitsProcessorList(), StoppingCriteriaList(), config)
        inputs = {"past_key_values": new_cache(model.config), "use_cache": True, "attention_mask": prompt.ge(0).long()}
        self.decoding = SpeculativeDecoding(model, drafter, batch, config, inputs)
        self._target: Any = self.decoding.target
        self._num_shown = shown_slots(context + max(NODES))
        self.hooks = self._target.feature_hooks
        with self.hooks.active():
            self.decoding.prefill()
        self._trees = {str(num): TreeBuffers(1, num, prompt.device) for num in NODES}  # of these sizes and no bucket's
        for num in NODES:
            self._trees[str(num)].give(self.ids[:, -num:], binary_tree(num, prompt.device).parents)
        self.plain = prefilled(model, prompt)
        self.packed = PackedReads([model, drafter], AUTO)
        self.feature = torch.zeros(1, NUM_NEW, drafter.feature_size, dtype=model.dtype)
        view = self.decoding.target
        own = {name: getattr(view, name) for name in ("vocab_size", "feature_dim", "embed", "head")}
        head = torch.compile(lambda features: apply_head(self.model, features), backend=BACKEND, dynamic=False)
        self._views = {STOCK: view, PACKED: view, FROZEN: SimpleNamespace(**{**own, "head": head})}

    def seconds(self, weights: str, work: str) -> float:
        """The seconds of a plain step, a read of so many nodes, or a pass, with one kind of weights."""
        backend = BACKEND if weights == FROZEN else None
        self.decoding.target.backend = self.decoding.generator.backend = backend
        self.decoding.generator.target = self._views[weights]
        if weights != PACKED:
            return self._timed(work)
        with self.packed.prepared(), self.packed.reading("draft" if work == PASS else "read", work != "1"):
            return self._timed(work)

    def _timed(self, work: str) -> float:
        if work == PLAIN:
            with self.hooks.paused():
                seconds = _seconds(self._plain_step)
            drop_last(self.plain.cache, 1)
        elif work == PASS:
            seconds = self._pass_seconds()
        else:
            target, buffers = self._target, self._trees[work]
            self.hooks.discard()
            seconds = _seconds(lambda: target._read_static(target.state, buffers, self._num_shown))
        return seconds

    def _plain_step(self) -> Any:
        num_read = self.plain.cache.get_seq_length()
        step = {"attention_mask": torch.ones_like(self.ids[:, : num_read + 1])}
        step["position_ids"] = torch.full_like(self.ids[:, :1], num_read)
        return self.model(self.ids[:, -1:], past_key_values=self.plain.cache, use_cache=True, **step)

    def _pass_seconds(self) -> float:
        generator: Any = self.decoding.generator
        num = torch.tensor([[NUM_NEW]])
        generator.commit_kept(Kept(self.ids[:, :NUM_NEW], self.feature, num, (NUM_NEW,)))
        budget = DraftBudget((max(NODES),), max(NODES), num_passes=1)
        seconds = _seconds(lambda: generator.propose(budget))
        generator.num_read = [read - NUM_NEW for read in generator.num_read]
        generator.fixed.cache.lengths.sub_(num)
        return seconds


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


WORK = [(STOCK, PLAIN), *((weights, work) for weights in (STOCK, PACKED, FROZEN) for work in (*map(str, NODES), PASS))]


@torch.no_grad()
def measure(pair: Pair, path: Path, repeats: int) -> list[dict[str, Any]]:
    """The lines of a file: what compiling took, and rounds, of which those that are missing are measured now."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    done = [line for line in lines if "seconds" in line]
    if len(done) >= repeats:
        return lines
    with fresh_inductor_cache(), pair.hooks.active(), path.open("a", encoding="utf-8") as file:

        def note(line: dict[str, Any]) -> None:
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()

        note({"compiled": compile_all(pair)})
        with torch._dynamo.config.patch(error_on_recompile=True):  # which would be measured
            for number in range(len(done) - NUM_WARM_UP, repeats):
                order = WORK.copy()
                random.Random(number).shuffle(order)
                found = {f"{weights} {work}": pair.seconds(weights, work) for weights, work in order}
                if number >= len(done):
                    note({"seconds": found})
    return lines


def compile_all(pair: Pair) -> dict[str, float]:
    """Compile whatever is measured; the seconds and the memory that it takes."""
    torch.compile(torch.neg, backend=BACKEND)(torch.zeros(4))  # the compiler itself is loaded first
    before, start = resident_bytes(), time.perf_counter()
    for weights, work in WORK:
        if weights == FROZEN:
            pair.seconds(weights, work)
    return {"seconds": time.perf_counter() - start, "bytes": resident_bytes() - before}


def resident_bytes() -> int:
    """The memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rows_of(lines: Sequence[dict[str, Any]], packed_bytes: int) -> list[dict[str, Any]]:
    """A row for each kind of weights: seconds of all work, and its cost in plain steps, with 95 % intervals."""
    rounds = [line["seconds"] for line in lines if "seconds" in line]
    compiled = [line["compiled"] for line in lines if "compiled" in line][-1]
    more = {STOCK: {}, PACKED: {"bytes": packed_bytes}, FROZEN: compiled}
    plain = f"{STOCK} {PLAIN}"
    rows = []
    for weights in (STOCK, PACKED, FROZEN):
        row: dict[str, Any] = {"weights": weights, "plain_seconds": _median(plain, rounds), "more": more[weights]}
        for work in (*map(str, NODES), PASS):
            key = f"{weights} {work}"
            pairs = [(found[key], found[plain]) for found in rounds]
            row[work] = {
                "seconds": _median(key, rounds),
                "interval": bootstrap(rounds, functools.partial(_median, key), 0),
                "cost": _ratio(pairs),
                "cost_interval": bootstrap(pairs, _ratio, 0),
            }
        rows.append(row)
    return rows


def _median(key: str, rounds: Sequence[Round]) -> float:
    return statistics.median(found[key] for found in rounds)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    work, plain = zip(*pairs, strict=True)
    return statistics.median(work) / statistics.median(plain)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_pair(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=200, help="tokens before each read")
    parser.add_argument("--repeats", type=int, default=40, help="rounds")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "frozen.json")
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    origin = provenance(seed=0, **{key: str(value) for key, value in vars(args).items()})
    target, _tokenizer, drafter = load_pair(args)
    name = f"{args.output.stem}_{args.shape or 'small'}_{args.dtype}_{torch.backends.cpu.get_cpu_capability().lower()}"
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        pair = Pair(target, drafter, args.context)
        lines = measure(pair, args.output.with_name(f"{name}.jsonl"), args.repeats)
    rows = rows_of(lines, pair.packed.num_bytes)
    add_case(args.output, {**{key: str(origin[key]) for key in CASE}, "provenance": origin, "rows": rows})
    for row in rows:
        print(row["weights"], *(f"{work}: {row[work]['cost']:.2f}" for work in (*map(str, NODES), PASS)))


def tables(result: Result, path: str) -> list[str]:
    """Every case, with each kind of weights."""
    shown = "{@/seconds:1000*.1f} ms ({@/interval:1000*~.1f}), {@/cost:.2f} ({@/cost_interval:~.2f})"
    columns = {
        "pair": "{shape}",
        "processor": "{device}",
        "plain step": "{plain_seconds:1000*.1f} ms",
        "weights": "{weights}",
        **{f"{num} node{'s' * (num > 1)}": shown.replace("@", str(num)) for num in NODES},
        "a pass": shown.replace("@", PASS),
        "compiled in": "{more/seconds:.0f} s",
        "more memory": "{more/bytes:1e-6*.0f} MB",
    }
    lead = (
        "A read of the target and a pass of the embedded drafter, in milliseconds and in plain steps (95 % intervals), "
        f"{result['provenance']['dtype']}, after {result['provenance']['context']} tokens; the file names the commit of each case."
    )
    return [lead, table(columns, shown_rows(result)), source_line(result, path)]


REPORT = Report("docs/scale.md", ["frozen.json"], tables, order=2)


if __name__ == "__main__":
    main()
