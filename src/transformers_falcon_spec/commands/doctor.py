"""`falcon-spec doctor`: find out why drafts are rejected, or why decoding is not faster, and what to do."""

import json
from dataclasses import replace
from typing import Any

from rich.console import Console

from ..convert.conversion import check_there, conversion_of
from ..errors import CheckpointError
from ..evaluation.doctor import (
    Report,
    built_in_prompts,
    check_tree_reading,
    diagnose,
    environment,
    shown,
    training_record,
)
from ..evaluation.prompts import read_prompts
from .loading import LAYER_PARALLEL, load_drafter
from .options import DoctorCommand

_OF_CONVERSION = ("source", "format", "target", "date", "source_sha256")


def run(command: DoctorCommand) -> None:
    """Examine the pair, and print the report."""
    check_there(command.target, "target")
    if command.drafter is not None and command.drafter.partition(":")[0] != LAYER_PARALLEL:
        check_there(command.drafter)

    report = Report(command.target, command.drafter)
    report.sections["environment"] = environment(command.device)
    _examine(command, report)
    if command.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        _show(report)


def _examine(command: DoctorCommand, report: Report) -> None:
    """Load the models and examine them; the drafter with the target, by texts that both write."""
    name = command.target
    try:
        target, tokenizer = command.load_target()
        if command.drafter is None:
            check_tree_reading(target, report)
            return

        name = command.drafter
        drafter = load_drafter(name, target)
    except CheckpointError as error:
        report.add("broken checkpoint", f"`{name}` cannot be loaded: {error}")
        return

    if converted := conversion_of(drafter):
        report.sections["conversion"] = {key: converted[key] for key in _OF_CONVERSION if key in converted}

    prompts = read_prompts(command.prompts, command.limit) if command.prompts else built_in_prompts()[: command.limit]
    prompts = [replace(prompt, template_kwargs=command.template_kwargs) for prompt in prompts]
    diagnose(target, tokenizer, drafter, prompts, command.max_new_tokens, training_record(name), report)


def _show(report: Report) -> None:
    """Print the conclusion and each finding with its remedy, then what was measured."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.rule("conclusion", align="left")
    console.print(report.conclusion)
    for found in map(shown, report.findings):
        console.print(f"\n{found['name'].upper()}: {found['text']}\n  -> {found['remedy']} ({found['documentation']})")

    for title, section in report.sections.items():
        console.rule(title, align="left")
        for name, value in section.items():
            console.print(f"{name.replace('_', ' '):24s} {_format(value)}")


def _format(value: Any) -> str:
    """Format a value for people."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(inner)}" for name, inner in value.items()) or "-"
    if isinstance(value, list | tuple):
        return " ".join(map(_format, value)) or "-"

    named = {True: "yes", False: "no"} if isinstance(value, bool) else {None: "-", "": "-"}
    return named.get(value, str(value))
