"""`falcon-spec generate`: stream text from a target with a drafter; `--compare` also runs the target alone.

The comparison checks token for token that both texts are the same and shows where the time went. `--show_tree` prints the tree of
each step instead of the text as it grows, and `--tree_html` writes these trees to a page; docs/trees.md explains both.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer, logging

from ..core.stats import GenerationStats
from ..drafters.base import DrafterModel
from ..drafters.drafter_pool import DrafterPool
from ..errors import OptionError
from ..evaluation.decoding import repetition_rate
from ..evaluation.parity import ParityCheck
from ..evaluation.prompts import Prompt, read_prompts
from ..evaluation.step_page import WatchedText, render_step_page
from ..evaluation.step_text import step_text
from ..evaluation.steps import StepLog
from ..generation.output import observe_steps
from ..generation.timed import Run, timed_generate
from ..provenance import provenance
from .loading import TREE_HELP, load_assistant, load_target

WARM_UP_TOKENS = 8
BAR_WIDTH = 40


@dataclass
class GenerateCommand:
    """What to write, with what."""

    target: str = field(metadata={"help": "Folder or Hub name of the target."})
    drafter: list[str] = field(
        metadata={"help": "Folder or Hub name of the drafter; of several each step asks the one that brings most."}
    )
    prompt: list[str] = field(default_factory=list, metadata={"help": "Prompts, each in quotes."})
    prompts: list[str] = field(default_factory=list, metadata={"help": "JSON lines files of prompts."})
    compare: bool = field(default=False, metadata={"help": "Also run the target alone, check and compare."})
    max_new_tokens: int = field(default=128, metadata={"help": "Most tokens to write."})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy; above, samples are drawn."})
    top_p: float = field(default=1.0, metadata={"help": "Draw from the smallest set of this mass."})
    seed: int = field(default=0, metadata={"help": "Of the sampling."})
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str = field(default="cpu", metadata={"help": "cpu, cuda, or auto to spread over devices."})
    limit: int | None = field(default=None, metadata={"help": "Use this many prompts of each file only."})
    draft_tree: str | None = field(default=None, metadata={"help": TREE_HELP})
    show_tree: bool = field(
        default=False, metadata={"help": "Print the tree of each step: tokens, how likely they seemed, what was kept."}
    )
    tree_html: str | None = field(default=None, metadata={"help": "HTML page to write, with the trees of all steps."})

    def __post_init__(self) -> None:
        """A prompt must come from somewhere, and what is timed must not be watched."""
        if self.compare and self.watches_steps:
            raise OptionError(
                "`compare` measures time, and watching steps takes some: give `show_tree` and `tree_html` without `compare`."
            )
        if not self.prompt and not self.prompts:
            raise OptionError("There must be something to write after: give `--prompt TEXT` or `--prompts FILE`.")

    @property
    def watches_steps(self) -> bool:
        """Whether somebody looks at trees."""
        return self.show_tree or self.tree_html is not None

    @property
    def options(self) -> dict[str, bool | float | int]:
        """The sampling options of `generate`."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


def run(command: GenerateCommand) -> None:
    """Write every prompt's text; compare if asked."""
    logging.set_verbosity_error()
    target, tokenizer = load_target(command.target, command.dtype, command.device)
    drafter = load_assistant(command.drafter, target, tokenizer, command.draft_tree)
    prompts = [Prompt("command", str(i), (("user", text),)) for i, text in enumerate(command.prompt)]
    prompts += read_prompts(command.prompts, command.limit)
    console = Console()
    if command.compare:
        _compare(command, target, tokenizer, drafter, prompts, console)
        return
    if command.watches_steps:
        _watch(command, target, tokenizer, drafter, prompts, console)
        return
    for prompt in prompts:
        console.rule(prompt.text.split("\n")[0][:70])
        ids = prompt.input_ids(tokenizer).to(target.device)
        torch.manual_seed(command.seed)
        target.generate(  # type: ignore[operator]  # `PreTrainedModel` does not declare it
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=drafter,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            max_new_tokens=command.max_new_tokens,
            **command.options,
        )


def _watch(
    command: GenerateCommand,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DrafterModel | DrafterPool,
    prompts: list[Prompt],
    console: Console,
) -> None:
    """Write every prompt's text, and show the trees of its steps."""
    texts = []
    for prompt in prompts:
        log = StepLog(tokenizer)
        with observe_steps(log):
            ids = prompt.input_ids(tokenizer)
            done = timed_generate(target, ids, command.max_new_tokens, command.options, command.seed, drafter)
        text = str(tokenizer.decode(done.new_ids, skip_special_tokens=True))
        texts.append(WatchedText(prompt.text, text, log.steps))
        console.rule(prompt.text.split("\n")[0][:70])
        for number, step in enumerate(log.steps if command.show_tree else [], start=1):
            console.print(step_text(number, step))
        console.print(text, markup=False, highlight=False)
    if command.tree_html is not None:
        dtype = str(target.dtype).removeprefix("torch.")
        page = render_step_page(texts, provenance(**{**vars(command), "dtype": dtype}))
        Path(command.tree_html).write_text(page, encoding="utf-8")
        console.print(f"{command.tree_html} shows the trees", markup=False, highlight=False, soft_wrap=True)


def _compare(
    command: GenerateCommand,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DrafterModel | DrafterPool,
    prompts: list[Prompt],
    console: Console,
) -> None:
    """Both arms on every prompt, in turn; then the tables and the verdict."""
    for assistant in (None, drafter):
        timed_generate(
            target, prompts[0].input_ids(tokenizer), WARM_UP_TOKENS, command.options, command.seed, assistant
        )
    stats, seconds, num_tokens, verdicts = GenerationStats(), {"alone": 0.0, "drafted": 0.0}, 0, []
    for prompt in prompts:
        ids = prompt.input_ids(tokenizer)
        plain, drafted = (
            timed_generate(target, ids, command.max_new_tokens, command.options, command.seed, assistant)
            for assistant in (None, drafter)
        )
        console.rule(prompt.text.split("\n")[0][:70])
        console.print(tokenizer.decode(drafted.new_ids, skip_special_tokens=True), markup=False, highlight=False)
        verdicts.append(_verdict(command, target, tokenizer, drafter, prompt, plain, drafted))
        speedup = plain.seconds / drafted.seconds * len(drafted.new_ids) / len(plain.new_ids)
        console.print(
            f"[{verdicts[-1]}; {speedup:.2f}x; acceptance length {drafted.output.speculation.acceptance_length:.2f}; "
            f"{repetition_rate(drafted.new_ids):.0%} repeated]",
            markup=False,
            style="dim",
        )
        stats += drafted.output.speculation
        seconds["alone"] += plain.seconds * len(drafted.new_ids) / len(plain.new_ids)
        seconds["drafted"] += drafted.seconds
        num_tokens += len(drafted.new_ids)
    _show(stats, seconds, num_tokens, console)
    console.print(
        _conclusion(verdicts, seconds["alone"] / seconds["drafted"]), markup=False, highlight=False, soft_wrap=True
    )


def _verdict(
    command: GenerateCommand,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DrafterModel | DrafterPool,
    prompt: Prompt,
    plain: Run,
    drafted: Run,
) -> str:
    if plain.new_ids == drafted.new_ids:
        return "identical"
    check = ParityCheck(target, tokenizer, drafter, command.max_new_tokens, command.seed)
    return check.run(prompt, command.options).verdict


def _show(stats: GenerationStats, seconds: dict[str, float], num_tokens: int, console: Console) -> None:
    """Speed of both arms, acceptance, and a bar of where the drafted run spent its time."""
    table = Table(title="Target alone and with the drafter")
    for column in ("", "tokens/s", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    for arm, spent in (("target alone", seconds["alone"]), ("with drafter", seconds["drafted"])):
        table.add_row(arm, f"{num_tokens / spent:.1f}", f"{spent:.2f}")
    console.print(table)
    by_depth = " ".join(f"{share:.2f}" for share in stats.acceptance_by_depth)
    console.print(f"acceptance length {stats.acceptance_length:.2f}; acceptance by depth: {by_depth}", highlight=False)
    histogram = Table("accepted", "steps", "", title="Draft tokens kept per step")
    most = max(stats.acceptance_histogram.values(), default=1)
    for accepted, steps in sorted(stats.acceptance_histogram.items()):
        histogram.add_row(str(accepted), str(steps), "█" * round(BAR_WIDTH * steps / most))
    console.print(histogram)
    phases = {"prefill": stats.prefill_seconds, "drafting": stats.draft_seconds, "verifying": stats.verify_seconds}
    phases["elsewhere"] = stats.other_seconds
    for (name, spent), mark in zip(phases.items(), "░▓█▒", strict=True):
        share = spent / stats.total_seconds
        console.print(f"{name:10s} {share:5.1%} {mark * round(BAR_WIDTH * share)}", highlight=False)


def _conclusion(verdicts: list[str], speedup: float) -> str:
    """The last line, in words."""
    differ, ties = verdicts.count("bug"), verdicts.count("tie")
    if differ:
        text = f"The texts DIFFER on {differ} of {len(verdicts)} prompts"
    elif ties:
        text = f"The texts are identical but for {ties} proven ties in {len(verdicts)} prompts"
    else:
        text = f"The texts are identical on all {len(verdicts)} prompts"
    return f"{text}; with the drafter the target writes {speedup:.2f} times as fast."
