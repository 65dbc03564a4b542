"""`falcon-spec bench`: measure speed and acceptance of methods on prompt files, and write the results as JSON."""

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import logging

from ..convert.conversion import check_there
from ..evaluation.benchmark import Benchmark, Failure, noting
from ..evaluation.methods import BASELINE, decoding_options
from ..evaluation.prompts import check_lengths
from ..evaluation.records import changes_greedy_text, failure_of, is_complete
from ..evaluation.summary import summarize
from .loading import LAYER_PARALLEL, PROMPT_LOOKUP, load_method, load_tree, method_name, read_config
from .options import BenchCommand


def run(command: BenchCommand) -> None:
    """Measure all methods on the target, write the results, and print a table."""
    logging.set_verbosity_error()
    _check(command)
    prompts = command.read_prompts()
    config, tokenizer = read_config(command.target, command.gguf_file)
    check_lengths(prompts, tokenizer, config, command.max_new_tokens)

    target, tokenizer = command.load_target()
    methods = []
    failures: list[Failure] = []
    for source in command.methods:
        with noting(failures, BASELINE, method_name(source), "loading"):
            methods.append(load_method(source, target, command.draft_tree, command.capture))
    benchmark = Benchmark(
        target=target,
        tokenizer=tokenizer,
        methods=methods,
        prompts=prompts,
        decodings=command.decodings,
        max_new_tokens=command.max_new_tokens,
        seed=command.seed,
    )
    outcome = benchmark.run(command.records_file)
    entries = benchmark.describe(outcome)
    entries += [{"target": BASELINE, "method": each.method, "failure": each.to_json()} for each in failures]
    outcome.failures[:0] = failures
    planned = Counter(prompt.set_name for prompt in prompts)
    rows = summarize(outcome.records, command.seed, planned)
    dtypes = {BASELINE: str(target.dtype).removeprefix("torch.")}
    origin = command.origin(target, targets={BASELINE: command.target}, dtype=dtypes)
    command.write({"provenance": origin, "methods": entries, "rows": rows})
    _show({"methods": entries, "rows": rows})
    outcome.complete()


def _check(command: BenchCommand) -> None:
    """Refuse what cannot be measured or written, before models are loaded for hours of runs."""
    for name in command.decodings:
        decoding_options(name)
    for source in command.methods:
        if source != PROMPT_LOOKUP:
            check_there(source.split(":", 2)[-1] if source.startswith(LAYER_PARALLEL) else source, "method")
    if command.draft_tree is not None:
        load_tree(command.draft_tree)


def _show(result: dict[str, Any]) -> None:
    table = Table("method", "decoding", "set", "acceptance length", "speed-up", "identical")
    for row in result["rows"]:
        cells = [f"{row['acceptance_length_pooled']:.2f}", "-", "-"]
        if not is_complete(row):
            cells = ["-", failure_of(result, row), "-"]
        elif "speedup" in row:
            low, high = row["speedup_interval"]
            mark = " (!)" if changes_greedy_text(row) else ""
            cells[1:] = [
                f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})",
                f"{row['num_identical']}/{row['num_compared']}{mark}",
            ]
        table.add_row(row["method"], row["decoding"], row["set"], *cells)
    Console().print(table)
