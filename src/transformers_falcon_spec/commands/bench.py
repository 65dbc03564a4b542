"""`falcon-spec bench`: measure speed and acceptance of methods on prompt files, and write the results as JSON.

A method is a drafter of this package, stock generation with a small model or a DFlash drafter, or stock prompt lookup:
  models/falcon-reference          a folder; its config says which of those it is
  NAME=FOLDER                      the same under a name of its own
  NAME@TARGET=FOLDER               for the target of that name only
  prompt-lookup, prompt-lookup:N   Transformers' prompt lookup of 10 or N tokens
  trees:FOLDER                     a DFlash drafter of Transformers in the loop of this package
Runs of the target alone and of all methods are interleaved. Stock methods and the target alone run without code of
this package. If a method raises an error, the others finish and the exit status is 1; the same command continues where
it stopped and tries again. A method whose memory process is killed by a signal (a crash, no memory left) is skipped.
docs/benchmarks.md explains every number.

Example, on the embedded pair:
  falcon-spec bench --targets models/reference-target --methods falcon=models/falcon-reference prompt-lookup
                    --prompts benchmarks/prompts/gsm8k.jsonl --limit 10 --output speed.json
"""

import gc
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import logging

from ..errors import OptionError, ProcessKilledError
from ..evaluation.benchmark import Benchmark, Failure, Outcome, noting
from ..evaluation.decoding import decoding_options
from ..evaluation.methods import BASELINE
from ..evaluation.prompts import Prompt, check_lengths
from ..evaluation.results import changes_greedy_text, failure_of, is_complete
from ..evaluation.summary import summarize
from ..provenance import portable, provenance
from .loading import load_target, load_tree, read_config
from .memory import MemoryRun
from .methods import MethodEntry, parse_methods, parse_targets
from .options import STEP_HELP, TREE_HELP, ModelOptions, ResultOptions, Step, TextOptions, check_least, option

Entry = dict[str, Any]


@dataclass(kw_only=True)
class BenchCommand(ModelOptions, TextOptions, ResultOptions):
    """The methods to measure, and how often."""

    targets: list[str] = option("Folders or Hub names of targets, each maybe as NAME=FOLDER.")
    methods: list[str] = option("What to compare with the target alone, as listed above.")
    decodings: list[str] = option("Names of decodings; see the docs.", ["greedy", "temperature-0.7"])
    baseline: bool = option("Also run the target alone; without it there is no speed-up.", True)
    memory_texts: int = option(
        "Texts of each prompt file that a fresh process of each method writes before its peak memory is read; 0 "
        "measures no memory.",
        2,
    )
    seed: int = option("Of sampling, order and intervals.", 0)
    threads: int | None = option("CPU threads; None leaves torch's choice.", None)
    draft_tree: str | None = option(f"{TREE_HELP} Methods that are no drafters of this package do without.", None)
    step: Step | None = option(f"{STEP_HELP} Other methods do without.", None)


def run(command: BenchCommand) -> None:
    """Measure all methods on all targets, write the results, and print a table."""
    logging.set_verbosity_error()
    torch.set_num_threads(command.threads or torch.get_num_threads())
    targets = parse_targets(command.targets)
    methods = parse_methods(command.methods, targets)
    for method in methods:
        method.check_there()
    for name in command.decodings:  # wrong options are refused before anything is loaded
        decoding_options(name)
    check_least(command, max_new_tokens=2, memory_texts=0)
    _check_can_be_written(Path(command.output))
    prompts = command.read_prompts()
    if command.draft_tree is not None:
        load_tree(command.draft_tree)
    for folder in targets.values():
        config, tokenizer = read_config(folder)
        command.check_template(tokenizer)
        check_lengths(prompts, tokenizer, config, command.max_new_tokens)
    total, entries, dtypes = Outcome(), [], {}
    for name, folder in targets.items():
        outcome, found, dtypes[name] = _measure(command, name, folder, methods, prompts)
        entries += found
        total.records += outcome.records
        total.failures += outcome.failures
    planned = Counter(prompt.set_name for prompt in prompts)
    result = {
        "provenance": provenance(**{**vars(command), "targets": targets, "dtype": dtypes}),
        "methods": entries,
        "rows": summarize(total.records, command.seed, planned),
    }
    command.write(result)
    _show(result)
    total.complete()


def _check_can_be_written(output: Path) -> None:
    """Check that the results can be written, before hours of runs."""
    for path in (output, output.with_suffix(".jsonl")):
        if path.is_dir():
            raise OptionError(f"`output` must be a file, but `{path}` is a folder. Name a file in it.")
    folder = next(folder for folder in output.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(
            f"`output` must lie in a folder that can be written to, but `{folder}` is none. Choose another."
        )


def _measure(
    command: BenchCommand, name: str, folder: str, methods: list[MethodEntry], prompts: list[Prompt]
) -> tuple[Outcome, list[Entry], str]:
    """Measure all methods on one target; return their runs, their entries in the results, and the target's dtype."""
    wanted = [entry for entry in methods if entry.target in (None, name)]
    sources: dict[str, str | None] = {BASELINE: None} if command.baseline else {}
    sources |= {entry.name: entry.source for entry in wanted}
    failed_memory: list[Failure] = []
    peaks = _memory(command, name, folder, sources, failed_memory)
    killed = {failure.method for failure in failed_memory if failure.error == ProcessKilledError.__name__}
    target, tokenizer = load_target(folder, command.dtype, command.device)
    failures: list[Failure] = []
    loaded = []
    for entry in (entry for entry in wanted if entry.name not in killed):
        with noting(failures, name, entry.name, "loading"):
            loaded.append(entry.load(target, command.draft_tree, command.step))
    benchmark = Benchmark(
        target=target,
        tokenizer=tokenizer,
        methods=loaded,
        prompts=prompts,
        decodings=command.decodings,
        max_new_tokens=command.max_new_tokens,
        seed=command.seed,
        with_baseline=command.baseline and BASELINE not in killed,
        target_name=name,
    )
    outcome = benchmark.run(command.records_file)
    outcome.failures[:0] = failures
    reported = {failure.method for failure in outcome.failures}
    outcome.failures += [failure for failure in failed_memory if failure.method not in reported]
    described = {entry["method"]: entry for entry in benchmark.describe(outcome)}
    failed = {failure.method: failure.to_json() for failure in outcome.failures}
    entries = [
        {"target": name, "method": method, **described.get(method, {}), "source": portable(source or folder),
         **peaks.get(method, {}), "failure": failed.get(method)}
        for method, source in sources.items()
    ]  # fmt: skip
    return outcome, entries, str(target.dtype).removeprefix("torch.")


def _memory(
    command: BenchCommand, name: str, folder: str, sources: dict[str, str | None], failures: list[Failure]
) -> dict[str, Entry]:
    """Measure the peak memory of each method in a process of its own, before this process loads anything."""
    gc.collect()  # free the target that was measured before
    torch.cuda.empty_cache()
    peaks: dict[str, Entry] = {}
    for method, source in sources.items() if command.memory_texts else ():
        memory_run = MemoryRun(
            target=folder,
            source=source,
            prompts=command.prompts,
            limit=command.memory_texts,
            max_new_tokens=command.max_new_tokens,
            dtype=command.dtype,
            device=command.device,
            threads=torch.get_num_threads(),
            draft_tree=command.draft_tree,
            step=command.step,
            template_kwargs=command.template_kwargs,
        )
        with noting(failures, name, method, "measuring memory"):
            peaks[method] = asdict(memory_run.measure())
    return peaks


def _show(result: dict[str, Any]) -> None:
    table = Table("target", "method", "decoding", "set", "acceptance length", "speed-up", "identical")
    for row in result["rows"]:
        low, high = row.get("speedup_interval", (0, 0))
        speedup = f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})" if "speedup" in row else "-"
        same = f"{row['num_identical']}/{row['num_compared']}" if "speedup" in row else "-"
        cells = [f"{row['acceptance_length_pooled']:.2f}", speedup, same + " (!)" * changes_greedy_text(row)]
        if not is_complete(row):
            cells = ["-", failure_of(result, row), "-"]
        table.add_row(row["target"], row["method"], row["decoding"], row["set"], *cells)
    Console().print(table)
