"""`falcon-spec generate`: stream text from a target with a drafter; `--compare` also runs the target alone.

The comparison checks token for token that both texts are the same, and shows what took the time. `--show_tree` prints
the tree of each step instead of streaming the text, and `--tree_html` writes these trees to a page; docs/trees.md
explains both.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer, logging

from ..core.stats import GenerationStats
from ..drafters.base import DrafterModel
from ..errors import OptionError
from ..evaluation.decoding import repetition_rate
from ..evaluation.parity import ParityCheck
from ..evaluation.prompts import Prompt, read_prompts
from ..evaluation.steps import ObservedText, StepLog, render_step_page, step_text
from ..generation.output import observe_steps
from ..generation.timed import Run, timed_generate
from .loading import load_drafter
from .options import STEP_HELP, TREE_HELP, Step, TargetOptions, TextOptions, option

WARM_UP_TOKENS = 8
BAR_WIDTH = 40
_USUAL_LOAD = 0.75  # running programs for each core, above which they take time from each other


@dataclass(kw_only=True)
class GenerateCommand(TargetOptions, TextOptions):
    """The drafter, the prompts, and how the text is shown."""

    drafter: str = option("Folder or Hub name of the drafter.")
    prompt: list[str] = option("Prompts, each in quotes.", [])
    prompts: list[str] = option("JSON lines files of prompts.", [])
    compare: bool = option("Also run the target alone, and compare texts and times.", False)
    temperature: float = option("0 is greedy; above, samples are drawn.", 0.0)
    top_p: float = option("Draw from the smallest set of this mass.", 1.0)
    seed: int = option("Seed of the sampling.", 0)
    draft_tree: str | None = option(TREE_HELP, None)
    step: Step | None = option(STEP_HELP, None)
    show_tree: bool = option(
        "Print the tree of each step: tokens, their probabilities, and which were accepted.", False
    )
    tree_html: str | None = option("HTML page to write, with the trees of all steps.", None)

    def __post_init__(self) -> None:
        """Check that there are prompts, and that trees are not shown while time is measured."""
        if self.compare and (self.show_tree or self.tree_html):
            raise OptionError(
                "`compare` measures time, and watching steps takes some: give `show_tree` and `tree_html` without it."
            )
        if not self.prompt and not self.prompts:
            raise OptionError("There must be something to write after: give `--prompt TEXT` or `--prompts FILE`.")

    @property
    def options(self) -> dict[str, bool | float | int]:
        """The sampling options for `generate`."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


def run(command: GenerateCommand) -> None:
    """Write the text of each prompt; compare or show trees if asked."""
    logging.set_verbosity_error()
    target, tokenizer = command.load_target()
    kwargs = command.template_kwargs
    drafter = load_drafter(command.drafter, target, tokenizer, command.draft_tree, command.step, kwargs)
    prompts = [Prompt("command", str(i), (("user", text),), "", kwargs) for i, text in enumerate(command.prompt)]
    prompts += read_prompts(command.prompts, command.limit, kwargs)
    session = _Session(command, target, tokenizer, drafter)
    if command.compare:
        _compare(session, prompts)
    elif command.show_tree or command.tree_html:
        _show_trees(session, prompts)
    else:
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        for prompt in prompts:
            session.title(prompt)
            session.write(prompt, drafter, streamer=streamer)


@dataclass(frozen=True)
class _Session:
    """Holds the command, the loaded models and the terminal."""

    command: GenerateCommand
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DrafterModel
    console: Console = field(default_factory=lambda: Console(markup=False, highlight=False))

    def title(self, prompt: Prompt) -> None:
        self.console.rule(prompt.text.split("\n")[0][:70])

    def write(self, prompt: Prompt, assistant: Any, max_new_tokens: int | None = None, **options: Any) -> Run:
        """Generate the text of a prompt, with a drafter or by the target alone."""
        ids, most = prompt.input_ids(self.tokenizer), max_new_tokens or self.command.max_new_tokens
        return timed_generate(self.target, ids, most, self.command.options, self.command.seed, assistant, **options)

    def text(self, done: Run) -> str:
        return str(self.tokenizer.decode(done.new_ids, skip_special_tokens=True))


def _show_trees(session: _Session, prompts: list[Prompt]) -> None:
    """Write the text of each prompt, and show the trees of its steps."""
    command, console, texts = session.command, session.console, []
    for prompt in prompts:
        log = StepLog(session.tokenizer)
        with observe_steps(log):
            text = session.text(session.write(prompt, session.drafter))
        texts.append(ObservedText(prompt.text, text, log.steps))
        session.title(prompt)
        for number, step in enumerate(log.steps if command.show_tree else [], start=1):
            console.print(step_text(number, step))
        console.print(text)
    if command.tree_html:
        Path(command.tree_html).write_text(render_step_page(texts, command.origin(session.target)), encoding="utf-8")
        console.print(f"{command.tree_html} shows the trees", soft_wrap=True)


def _compare(session: _Session, prompts: list[Prompt]) -> None:
    """Run the target alone and with the drafter on each prompt, and print times, acceptance and differences."""
    assistants = (None, session.drafter)
    for assistant in assistants:
        session.write(prompts[0], assistant, max_new_tokens=WARM_UP_TOKENS)
    stats, seconds_alone, seconds = GenerationStats(), 0.0, 0.0
    verdicts: list[str] = []
    speedups: list[float] = []
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # of the minute before; Windows tells none
    for prompt in prompts:
        plain, drafted = (session.write(prompt, assistant) for assistant in assistants)
        session.title(prompt)
        session.console.print(session.text(drafted))
        verdicts.append(_verdict(session, prompt, plain, drafted))
        plain_seconds = plain.seconds * len(drafted.new_ids) / len(plain.new_ids)
        speedups.append(plain_seconds / drafted.seconds)
        session.console.print(
            f"[{verdicts[-1]}; {speedups[-1]:.2f}x; acceptance length "
            f"{drafted.output.speculation.acceptance_length:.2f}; {repetition_rate(drafted.new_ids):.0%} repeated]",
            style="dim",
        )
        stats += drafted.output.speculation
        seconds_alone += plain_seconds
        seconds += drafted.seconds
    _show(stats, {"target alone": seconds_alone, "with drafter": seconds}, session.console)
    session.console.print(_conclusion(verdicts, seconds_alone / seconds, speedups), soft_wrap=True)
    if load > _USUAL_LOAD * (os.cpu_count() or 1):
        session.console.print(
            f"Other programs were running here (load {load:.1f} on {os.cpu_count()} cores): these times say little.",
            soft_wrap=True,
        )


def _verdict(session: _Session, prompt: Prompt, plain: Run, drafted: Run) -> str:
    """Return whether two texts are identical, differ by a proven tie, or by a bug."""
    if plain.new_ids == drafted.new_ids:
        return "identical"
    command = session.command
    check = ParityCheck(session.target, session.tokenizer, session.drafter, command.max_new_tokens, command.seed)
    return check.run(prompt, command.options).verdict


def _show(stats: GenerationStats, seconds: dict[str, float], console: Console) -> None:
    """Print the speed of both methods, the acceptance, and what took the time with the drafter."""
    columns = (Column(name, justify="right") for name in ("tokens/s", "seconds"))
    table = Table("", *columns, title="Target alone and with the drafter")
    for method, spent in seconds.items():
        table.add_row(method, f"{stats.num_tokens / spent:.1f}", f"{spent:.2f}")
    console.print(table)
    by_depth = " ".join(f"{share:.2f}" for share in stats.acceptance_by_depth)
    console.print(f"acceptance length {stats.acceptance_length:.2f}; acceptance by depth: {by_depth}")
    histogram = Table("accepted", "steps", "", title="Draft tokens kept per step")
    most = max(stats.acceptance_histogram.values(), default=1)
    for accepted, steps in sorted(stats.acceptance_histogram.items()):
        histogram.add_row(str(accepted), str(steps), "█" * round(BAR_WIDTH * steps / most))
    console.print(histogram)
    phases = {"prefill": stats.prefill_seconds, "drafting": stats.draft_seconds, "verifying": stats.verify_seconds}
    phases["elsewhere"] = stats.other_seconds
    for (name, spent), mark in zip(phases.items(), "░▓█▒", strict=True):
        share = spent / stats.total_seconds
        console.print(f"{name:10s} {share:5.1%} {mark * round(BAR_WIDTH * share)}")


def _conclusion(verdicts: list[str], speedup: float, speedups: list[float]) -> str:
    """Summarise the comparison in one line."""
    differ, ties = verdicts.count("bug"), verdicts.count("tie")
    if differ:
        text = f"The texts DIFFER on {differ} of {len(verdicts)} prompts"
    elif ties:
        text = f"The texts are identical but for {ties} proven ties in {len(verdicts)} prompts"
    else:
        text = f"The texts are identical on all {len(verdicts)} prompts"
    spread = f" ({min(speedups):.2f} to {max(speedups):.2f} by prompt)" if len(speedups) > 1 else ""
    return f"{text}; with the drafter the target writes {speedup:.2f} times as fast{spread}."
