"""`falcon-spec bench`: measure speed and acceptance of methods on prompt files, and write the results as JSON."""

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from ..convert.conversion import check_there
from ..evaluation.benchmark import Benchmark
from ..evaluation.methods import BASELINE, decoding_options
from ..evaluation.summary import changes_greedy_text, summarize
from .loading import LAYER_PARALLEL, PROMPT_LOOKUP, load_method, load_tree
from .options import BenchCommand


def run(command: BenchCommand) -> None:
    """Measure all methods on the target, write the results, and print a table."""
    _check(command)
    prompts = command.read_prompts()
    target, tokenizer = command.load_target()
    methods = [load_method(source, target, command.draft_tree, command.capture) for source in command.methods]
    benchmark = Benchmark(
        target=target,
        tokenizer=tokenizer,
        methods=methods,
        prompts=prompts,
        decodings=command.decodings,
        max_new_tokens=command.max_new_tokens,
        seed=command.seed,
    )
    runs = benchmark.run(command.records_file)

    rows = summarize(runs, command.seed)
    dtypes = {BASELINE: str(target.dtype).removeprefix("torch.")}
    origin = command.origin(target, targets={BASELINE: command.target}, dtype=dtypes)
    command.write({"provenance": origin, "methods": benchmark.describe(runs), "rows": rows})
    _show(rows)


def _check(command: BenchCommand) -> None:
    """Refuse what cannot be measured or written, before models are loaded for hours of runs."""
    for name in command.decodings:
        decoding_options(name)

    for source in command.methods:
        if source != PROMPT_LOOKUP:
            check_there(source.split(":", 2)[-1] if source.startswith(LAYER_PARALLEL) else source, "method")

    if command.draft_tree is not None:
        load_tree(command.draft_tree)


def _show(rows: list[dict[str, Any]]) -> None:
    names = ("method", "decoding", "set", "acceptance length", "speed-up", "identical")
    table = Table(*(Column(name, overflow="fold") for name in names))  # names that are cut could be one another's
    for row in rows:
        low, high = row["speedup_interval"]
        mark = " (!)" if changes_greedy_text(row) else ""
        table.add_row(
            row["method"],
            row["decoding"],
            row["set"],
            f"{row['acceptance_length_pooled']:.2f}",
            f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})",
            f"{row['num_identical']}/{row['num_compared']}{mark}",
        )

    Console().print(table)
