"""`falcon-spec doctor`: say why drafts are not kept, or why it is not faster, and what to do.

It looks at the machine, at what the drafter's config says of its target, at how the target reads trees, and at the
chat template; then it writes a few texts with and without the drafter, compares what is kept with what results or
training promise, and what steps cost with what they bring. Each verdict has a section in docs/troubleshooting.md.

Example, on the embedded pair:
  falcon-spec doctor --target models/reference-target --drafter models/falcon-reference
                     --results benchmarks/results/speed.json
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from transformers import logging

from ..errors import CheckpointError
from ..evaluation.doctor.examination import Case, examine
from ..evaluation.doctor.files import why_unreadable
from ..evaluation.doctor.measurement import own_prompts
from ..evaluation.doctor.promise import Promise, promise_of
from ..evaluation.doctor.surroundings import environment
from ..evaluation.doctor.verdicts import Report
from ..evaluation.prompts import Prompt, read_prompts
from .loading import load_drafter
from .options import DTYPE_HELP, PairOptions, TextOptions, option

Loaded = TypeVar("Loaded")


@dataclass(kw_only=True)
class DoctorCommand(PairOptions, TextOptions):
    """What to hold the pair against."""

    results: str | None = option(
        "Results of `falcon-spec bench` to hold it against; else its training record is taken.", None
    )
    prompts: list[str] = option("JSON lines files of prompts; else those of the results, else a few questions.", [])
    limit: int | None = option("Use this many prompts of each file only.", 4)
    max_new_tokens: int = option("Most tokens of a text.", 64)
    dtype: str = option(DTYPE_HELP, "auto")
    json: bool = option("Print all of it as JSON.", False)


def run(command: DoctorCommand) -> None:
    """Examine, and print."""
    logging.set_verbosity_error()
    report = Report(command.target, command.drafter)
    report.sections["environment"] = environment(command.device)
    pair = _whole(report, command.target, command.load_target)
    if pair is not None:
        target, tokenizer = pair
        drafter = _whole(report, command.drafter, lambda: load_drafter(command.drafter, target))
        if drafter is not None:
            promise = promise_of(command.drafter, drafter, command.results)
            prompts = _prompts(command, promise)
            examine(Case(target, tokenizer, drafter, prompts, command.max_new_tokens, promise), report)
    if command.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        _show(report)


def _whole(report: Report, name: str, load: Callable[[], Loaded]) -> Loaded | None:
    """What was loaded; None, with a verdict, where its files are no whole model."""
    try:
        return load()
    except CheckpointError as error:
        report.verdicts.append(why_unreadable(name, error))
        return None


def _prompts(command: DoctorCommand, promise: Promise | None) -> list[Prompt]:
    files = command.prompts or (promise.prompts if promise is not None else [])
    return read_prompts(files, command.limit) if files else own_prompts()[: command.limit]


def _show(report: Report) -> None:
    """Sections line by line, then what is wrong and what to do."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for title, section in report.sections.items():
        console.rule(title, align="left")
        for name, value in section.items():
            console.print(f"{name.replace('_', ' '):24s} {_text(value)}")
    console.rule("verdict", align="left")
    console.print(report.conclusion)
    for verdict in report.verdicts:
        console.print(f"\n{verdict.name.upper()}: {verdict.text}\n  -> {verdict.remedy} ({verdict.place})")


def _text(value: Any) -> str:
    """A value as people read it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items()) or "-"
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value)) or "-"
    return str({True: "yes", False: "no"}[value] if isinstance(value, bool) else "-" if value in (None, "") else value)
